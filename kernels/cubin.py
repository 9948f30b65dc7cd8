"""What a cubin costs, read from its ELF sections: registers, stack and shared memory of each kernel.

A compiler's own report would do for NVRTC, but Triton's is not to be had; and a stack that is there is a
spill that happens, whatever the report calls it.
"""

import struct
from dataclasses import dataclass

# records of the sections .nv.info: a format byte, an attribute byte, two bytes of size or value
SIZED = 0x04  # the format whose value follows, that many bytes
REGISTERS, FRAME_BYTES = 0x2F, 0x11  # attributes: (number of a symbol, value)
SHARED = ".nv.shared."


@dataclass(frozen=True)
class Resources:
    """Of one thread: registers and stack. Of one block: static shared memory."""

    registers: int
    stack_bytes: int
    shared_bytes: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """By kernel name. Raises ValueError if cubin is no 64-bit ELF file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"a cubin must be a 64-bit ELF file, got {cubin[:5]!r}")
    sections = _sections(cubin)
    by_name = {name: (offset, size) for name, _, offset, size in sections}
    symbols = _symbols(cubin, sections)
    found: dict[str, dict[int, int]] = {}
    for attribute, (symbol, value) in _attributes(cubin, *by_name.get(".nv.info", (0, 0))):
        found.setdefault(symbols[symbol], {})[attribute] = value
    return {
        name: Resources(values[REGISTERS], values.get(FRAME_BYTES, 0), by_name.get(SHARED + name, (0, 0))[1])
        for name, values in found.items()
        if REGISTERS in values and f".text.{name}" in by_name
    }


def _text(table: bytes, start: int) -> str:
    return table[start : table.index(b"\0", start)].decode()


def _sections(cubin):
    """(name, type, offset, size) of each."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    offset, length = headers[names][4:6]
    table = cubin[offset : offset + length]
    return [(_text(table, h[0]), h[1], h[4], h[5]) for h in headers]


def _symbols(cubin, sections):
    """Names by number."""
    by_name = {name: (offset, size) for name, _, offset, size in sections}
    offset, size = by_name[".strtab"]
    table = cubin[offset : offset + size]
    offset, size = by_name[".symtab"]
    return [_text(table, struct.unpack_from("<I", cubin, offset + i)[0]) for i in range(0, size, 24)]


def _attributes(cubin, offset, size):
    """(attribute, two numbers) of each record that has two."""
    end = offset + size
    while offset < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, offset)
        offset += 4
        if form != SIZED:
            continue
        if length == 8:
            yield attribute, struct.unpack_from("<II", cubin, offset)
        offset += length
