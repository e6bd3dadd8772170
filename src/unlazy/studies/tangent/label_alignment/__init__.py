"""The label-alignment study: how a network's kernel turns toward what it learns (Figures 1 and 3; claims L6, L8, L9)."""
