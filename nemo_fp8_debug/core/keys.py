"""What an operand is called, in code and to people."""

from __future__ import annotations

#: operand roles of a GEMM: X of the forward pass, W, and the gradient of the output, dY
ROLES = ("input", "weight", "grad_output")
#: GEMM and role
Key = tuple[str, str]

#: the columns that say what a row is about; metrics follow
KEYS = ("layer", "gemm", "role")
#: how people write the operand roles
SHOWN_AS = {"input": "X", "weight": "W", "grad_output": "dY"}
#: source of the scales of experts that were not all found in the same way
MIXED = "mixed"
