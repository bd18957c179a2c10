"""Which documents share a packed row. Lengths in, rows out; no tokens, no files.

Best fit, longest first, within at most 11/9 of the fewest rows possible plus one (Johnson et al., SIAM J. Comput. 3,
1974). Rows by the room they have left sit in one list per amount, and the amounts in use are the bits of one whole
number, so finding the tightest row that still fits is one shift.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pack(lengths: NDArray[np.int32], max_length: int) -> list[list[int]]:
    """Rows of document numbers, each at most `max_length` tokens together, every document in exactly one.

    Deterministic. Within a row documents keep their order in the data, and so do rows by their first document.
    Raises ValueError for a document longer than `max_length`.
    """
    if len(lengths) and int(lengths.max()) > max_length:
        raise ValueError(f"a document of {int(lengths.max())} tokens cannot go into rows of {max_length}")
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0
    for document in np.argsort(-lengths.astype(np.int64), kind="stable"):
        length = int(lengths[document])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = max_length, len(rows)
            rows.append([])
        rows[row].append(int(document))
        if left := room - length:
            by_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return sorted(sorted(row) for row in rows)
