"""Registers, spills, shared memory and instructions of a compiled kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import triton

from .offline import Compiled, Target

_TENSOR_CORE = re.compile(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma_")
_TRAP = re.compile(r"^\s*(?:@%p\d+\s+)?trap;|^\s*s_trap", re.MULTILINE)
_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);")
_Instruction = tuple[int, str, str]  # address, name, operands


class Facts(NamedTuple):
    """What one compiled kernel needs.

    Args:
        registers: per thread (gfx942: vector registers, accumulators included).
        spills: spill instructions (gfx942: spilled vector registers).
        loop_spills: those inside innermost loops with tensor-core instructions; None if unknown.
        shared: bytes of shared memory; fits: whether the device has that much.
        tensor_core: tensor-core instructions; 0 means that products run on plain units.
        trap: the code holds a trap, which is how a failed compilation can look.
    """

    registers: int
    spills: int
    loop_spills: int | None
    shared: int
    fits: bool
    tensor_core: int
    trap: bool


def read(compiled: Compiled, target: Target) -> Facts:
    """Read the facts from the machine code of one kernel."""
    kernel = compiled.kernel
    text = kernel.asm["ptx" if "ptx" in kernel.asm else "amdgcn"]
    if "cubin" in kernel.asm:
        registers, spills, loop_spills = _nvidia(kernel.asm["cubin"])
    else:
        registers, spills, loop_spills = _amd(text)
    return Facts(
        registers,
        spills,
        loop_spills,
        kernel.metadata.shared,
        kernel.metadata.shared <= target.shared_limit,
        len(_TENSOR_CORE.findall(text)),
        bool(_TRAP.search(text)),
    )


def _amd(text: str) -> tuple[int, int, int | None]:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    return number("vgpr_count"), number("vgpr_spill_count"), None


def _nvidia(cubin: bytes) -> tuple[int, int, int | None]:
    usage, instructions = _disassemble(cubin)
    found = re.search(r"REG:(\d+)", usage)
    return (
        int(found[1]) if found else 0,
        _spills(instructions),
        sum(map(_spills, _main_loops(instructions))),
    )


def main_loops(compiled: Compiled) -> list[dict[str, int]]:
    """How often every instruction stands in each main loop of a kernel for NVIDIA, in order.

    Main loops are the innermost ones with tensor-core instructions.
    """
    _, instructions = _disassemble(compiled.kernel.asm["cubin"])
    counts = (Counter(op for _, op, _ in loop) for loop in _main_loops(instructions))
    return [dict(sorted(count.items())) for count in counts]


def _disassemble(cubin: bytes) -> tuple[str, list[_Instruction]]:
    """What cuobjdump says of resources, and (address, name, operands) of every instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = _cuobjdump("-res-usage", file.name), _cuobjdump("-sass", file.name)
    matches = map(_SASS.match, sass.splitlines())
    return usage, [(int(m[1], 16), m[2].split(".")[0], m[3]) for m in matches if m]


def _main_loops(instructions: list[_Instruction]) -> list[list[_Instruction]]:
    loops = _innermost_loops(instructions)
    return [loop for loop in loops if any("MMA" in op for _, op, _ in loop)]


def _spills(instructions: list[_Instruction]) -> int:
    return sum(op in ("LDL", "STL") for _, op, _ in instructions)


def _innermost_loops(instructions: list[_Instruction]) -> list[list[_Instruction]]:
    """Stretches between a backward branch and its target that hold no other such stretch."""
    place = {address: i for i, (address, _, _) in enumerate(instructions)}
    loops = set()
    for i, (address, op, operands) in enumerate(instructions):
        goal = re.search(r"0x([0-9a-f]+)", operands) if op == "BRA" else None
        if goal and int(goal[1], 16) < address and int(goal[1], 16) in place:
            loops.add((place[int(goal[1], 16)], i))
    inner = [a for a in loops if not any(b != a and b[0] >= a[0] and b[1] <= a[1] for b in loops)]
    return [instructions[begin : end + 1] for begin, end in sorted(inner)]


def _cuobjdump(option: str, path: str) -> str:
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
