"""What one sampling run did: counted while it runs, said once when it ends."""

import logging
import threading
from collections import Counter
from typing import Any

from .patch_settings import PatchSettings
from .run_record import RunRecord
from .status_events import send_status, show_text

log = logging.getLogger("vc_attention")

EIGHT_BITS = ("int8_int8", "int8_fp8", "fp8_fp8")


def say(text: str, node_id: str | None = None, level: int = logging.INFO) -> None:
    """One log line, and the same text as a note on the node if ComfyUI's server runs."""
    log.log(level, "[VC-Attention] %s", text)
    show_text(text, node_id)
    send_status(node_id, "note", text=text)


class RunReport:
    """Counts of one run. Threads of several GPUs may add to it at the same time.

    received = taken + the sum of declined, always. Of the declined, left holds those that were video
    self-attention: with the taken ones they are the calls that this pack is about.
    """

    def __init__(self, model_name: str, steps: int = 0, settings: PatchSettings | None = None):
        self.model_name = model_name
        self.steps = steps
        self.settings = settings
        self.record = RunRecord()
        self.received = 0
        self.taken = 0
        self.left: Counter[str] = Counter()  # video self-attention that was declined, by reason
        self.declined: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()  # "<kernel> (<numerics>)" -> calls
        self.grouped_calls = 0
        self.groupings_made = 0
        self.grouped_steps: set[int] = set()
        self.tokens = 0  # longest sequence taken
        self.state_bytes = 0  # most that groupings held at once
        self.head_groups = 1  # most groups of heads that a call was split into, because memory was short
        self.few_steps = False  # so few that none of them may run at 4 bits
        self.failures: dict[str, str] = {}  # kernel -> what it raised
        self.overwritten_by: str | None = None
        self.stopped = False  # by the user or by an error, before the last step
        self._lock = threading.Lock()

    def add_declined(self, reason: str, video: bool = False) -> None:
        with self._lock:
            self.received += 1
            self.left[reason] += video
            self.declined[reason] += 1

    def add_taken(self, kernel: str, tokens: int, grouped_step: int | None) -> None:
        with self._lock:
            self.received += 1
            self.taken += 1
            self.kernels[kernel] += 1
            self.tokens = max(self.tokens, tokens)
            if grouped_step is not None:
                self.grouped_calls += 1
                self.grouped_steps.add(grouped_step)

    def add_groupings(self, made: int, held_bytes: int) -> None:
        with self._lock:
            self.groupings_made += made
            self.state_bytes = max(self.state_bytes, held_bytes)

    def add_head_groups(self, groups: int) -> None:
        with self._lock:
            self.head_groups = max(self.head_groups, groups)

    def add_failure(self, kernel: str, message: str) -> bool:
        """Whether this kernel fails for the first time in this run."""
        with self._lock:
            first = kernel not in self.failures
            self.failures.setdefault(kernel, message)
            return first

    @property
    def video_calls(self) -> int:
        return self.taken + self.left.total()

    def status(self) -> dict[str, Any]:
        """The counts so far, for the browser."""
        with self._lock:
            return {
                "model": self.model_name,
                "precision": self.settings.config.precision if self.settings else "",
                "steps": self.steps,
                "received": self.received,
                "taken": self.taken,
                "video_calls": self.video_calls,
                "kernels": dict(self.kernels.most_common()),
                "left": {reason: calls for reason, calls in self.left.most_common() if calls},
                "warning": self.warning(),
            }

    def warning(self) -> str | None:
        """What a user should act on, in a sentence; None if all is well."""
        if self.stopped:
            return "Sampling was stopped before its end"
        if not self.received:
            who = f"; {self.overwritten_by} replaced the attention" if self.overwritten_by else ""
            return f"No attention call reached this node{who}"
        if self.failures:
            return "; ".join(f"{kernel} failed: {message}" for kernel, message in self.failures.items())
        if not self.taken:
            return f"None of {self.video_calls:,} video attention calls was taken"
        return None

    def progress(self, step: int) -> str:
        """While the run goes on, on the node."""
        return f"step {step + 1} of {self.steps}: {self._calls()}"

    def summary(self) -> str:
        """The whole run in one line."""
        if not self.received:
            why = f": {self.overwritten_by} replaced the attention" if self.overwritten_by else ""
            return f"{self.model_name}: received 0 calls{why}; output is unchanged by this node"
        parts = [f"{self.model_name}: {self._calls()}"]
        if self.taken:
            parts.append(f"up to {self.tokens:,} tokens")
            if self.grouped_steps:
                count = len(self.grouped_steps)
                parts.append(
                    f"values grouped in {count} of {self.steps} steps "
                    f"(order made {self.groupings_made} times, {self.state_bytes / 2**20:.1f} MiB at most)"
                )
            else:
                parts.append("no step inside the grouping window")
        precisions = self.precisions()
        if precisions:
            parts.append(precisions)
        if self.head_groups > 1:
            parts.append(f"memory was short: calls in up to {self.head_groups} groups of heads")
        parts += [f"{kernel} failed: {message}" for kernel, message in self.failures.items()]
        return "; ".join(parts)

    def precisions(self) -> str | None:
        """How a run of both precisions divided its steps between them; None for a run of one."""
        if self.settings is None or not self.settings.hybrid or not self.taken:
            return None
        count = f"{self.steps} step" + "s" * (self.steps != 1)
        if self.few_steps:
            return f"no 4 bits: with {count} each counts, so all ran at 8 bits"
        at_4_bits = self.record.steps_of("nvfp4")
        at_8_bits = set().union(*(self.record.steps_of(numerics) for numerics in EIGHT_BITS))
        if not at_4_bits and len(at_8_bits) == self.steps:
            return "no 4 bits: every step lies at an end of the denoising, which stays at 8 bits"
        text = f"4 bits in {len(at_4_bits)} of {count}"
        ends = [end for end, step in (("first", 0), ("last", self.steps - 1)) if step in at_8_bits]
        if ends:
            return f"{text}, 8 bits in the {' and the '.join(ends)} ones"
        return f"{text}, 8 bits in {len(at_8_bits)}" if at_8_bits else text

    def _calls(self) -> str:
        kernels = ", ".join(f"{count:,} {name}" for name, count in self.kernels.most_common())
        text = f"{self.taken:,} of {self.received:,} calls low-bit" + (f" ({kernels})" if kernels else "")
        left = ", ".join(f"{count:,} {reason}" for reason, count in self.declined.most_common())
        return text + (f", {self.received - self.taken:,} left alone ({left})" if left else "")
