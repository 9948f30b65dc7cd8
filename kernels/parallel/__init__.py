"""Slots of the distributed engines that users run: one file per engine, imported only when asked for."""
