"""Assigns documents to packed rows, by their lengths alone.

Best-fit decreasing: at most 11/9 of the fewest possible rows, plus one (Johnson et al., SIAM J. Comput. 3, 1974). Rows
are indexed by their number of free tokens. Bit n of one integer says whether a row with n free tokens exists, so a
shift finds the fullest row into which a document still fits.

Try: `python -c "import numpy; from engine.data.packing import pack; print(pack(numpy.array([3, 5, 2]), 5))"`
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pack(lengths: NDArray[np.int32], max_length: int) -> list[list[int]]:
    """Pack documents into rows of at most `max_length` tokens: for each row, the numbers of its documents.

    Deterministic. Documents in a row keep the order of the data; rows are sorted by their first document.
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
