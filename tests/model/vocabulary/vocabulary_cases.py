"""What ranks run in tests of divided tables: each with its part of the rows and of the tokens."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tierstore.model import tables
from tierstore.model.tables import DividedTable
from tierstore.parallel import Collective, Mesh
from tierstore.parallel.layout import TableRows

Found = dict[str, Any]


def divided(mesh: Mesh, whole_VD: Tensor) -> tuple[DividedTable, Tensor]:
    """The table of ``whole_VD``, and this rank's rows of it with their padding."""
    table = TableRows(*whole_VD.shape, mesh.data.size)
    own = table.owned(mesh.data.rank)
    rows_RD = torch.zeros(table.each, table.width, dtype=whole_VD.dtype)
    rows_RD[: len(own)] = whole_VD[own.start : own.stop]
    return DividedTable(table, mesh.data), rows_RD.requires_grad_()


def look_up(mesh: Mesh, whole_VD: Tensor, ids_T: Tensor, back_TD: Tensor, scale: float) -> Found:
    """Rows of this rank's part of ``ids_T``, the gradient of its rows of the table, and what it sent."""
    table, rows_RD = divided(mesh, whole_VD)
    before = {kind: sent.sent_bytes for kind, sent in mesh.data.traffic.items()}
    calls = mesh.data.traffic[Collective.ALL_TO_ALL].calls
    mine = slice(*(len(ids_T) // mesh.data.size * rank for rank in (mesh.data.rank, mesh.data.rank + 1)))
    x_BTD = table.embed(ids_T[mine].unsqueeze(0), rows_RD, scale=scale, dtype=back_TD.dtype)
    x_BTD.backward(back_TD[mine].unsqueeze(0))
    return {
        "x": x_BTD[0].detach(),
        "grad": rows_RD.grad,
        "calls": mesh.data.traffic[Collective.ALL_TO_ALL].calls - calls,
        "sent": {kind.value: sent.sent_bytes - before[kind] for kind, sent in mesh.data.traffic.items()},
    }


def look_up_many(mesh: Mesh, cases: list[tuple[Tensor, Tensor, Tensor, float]]) -> list[Found]:
    """Several of them, in one message to the ranks."""
    return [look_up(mesh, *case) for case in cases]


def look_up_uneven(
    mesh: Mesh, whole_VD: Tensor, ids_T: Tensor, back_TD: Tensor, scale: float, sizes: list[int]
) -> Found:
    """As ``look_up``, where rank r has ``sizes[r]`` of the tokens."""
    table, rows_RD = divided(mesh, whole_VD)
    own_T, own_TD = (torch.split(whole, sizes)[mesh.data.rank] for whole in (ids_T, back_TD))
    x_BTD = table.embed(own_T.unsqueeze(0), rows_RD, scale=scale, dtype=back_TD.dtype)
    x_BTD.backward(own_TD.unsqueeze(0))
    return {"x": x_BTD[0].detach(), "grad": rows_RD.grad}


def refused(mesh: Mesh, whole_VD: Tensor, ids_T: Tensor, bad: int) -> str:
    """What every rank raises where rank 1 has an id that is no row."""
    table, rows_RD = divided(mesh, whole_VD)
    if mesh.data.rank == 1:
        ids_T = torch.cat([ids_T[:1], torch.tensor([bad]), ids_T[1:-1]])
    try:
        table.embed(ids_T.unsqueeze(0), rows_RD, scale=1.0, dtype=torch.float32)
    except ValueError as error:
        return str(error)
    return "nothing"


def losses(mesh: Mesh, x_TD: Tensor, whole_VD: Tensor, targets_T: Tensor, chunk: int, factor: float) -> Found:
    """The loss of this rank's part of the tokens, the gradients, and logits."""
    table, rows_RD = divided(mesh, whole_VD)
    size, rank = mesh.data.size, mesh.data.rank
    mine = slice(len(x_TD) // size * rank, len(x_TD) // size * (rank + 1))
    own_TD = x_TD[mine].clone().requires_grad_()
    with mock.patch("tierstore.model.tables.CHUNK_LOGITS", chunk):
        loss_ = table.cross_entropy(own_TD, rows_RD, targets_T[mine])
        (loss_ * factor / size).backward()
        with torch.no_grad():
            again = table.cross_entropy(own_TD, rows_RD, targets_T[mine])
    assert chunk < tables.CHUNK_LOGITS
    return {
        "loss": loss_.detach(),
        "evaluated": again,
        "x_grad": own_TD.grad,
        "rows_grad": rows_RD.grad,
        "logits": table.logits(own_TD.detach().unsqueeze(0), rows_RD.detach())[0],
    }


def unlike_factors(mesh: Mesh, x_TD: Tensor, whole_VD: Tensor, targets_T: Tensor) -> str:
    """What is raised where ranks differentiate different multiples of their losses."""
    table, rows_RD = divided(mesh, whole_VD)
    loss_ = table.cross_entropy(x_TD.clone().requires_grad_(), rows_RD, targets_T)
    try:
        (loss_ * (1.0 + mesh.data.rank)).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def unlike_tokens(mesh: Mesh, x_TD: Tensor, whole_VD: Tensor, targets_T: Tensor) -> str:
    """What is raised where rank 1 has a token less."""
    table, rows_RD = divided(mesh, whole_VD)
    own = slice(len(x_TD) - mesh.data.rank)
    try:
        table.cross_entropy(x_TD[own], rows_RD, targets_T[own])
    except ValueError as error:
        return str(error)
    return "nothing"


def first_rows(mesh: Mesh, rows: int, width: int, drawn: int) -> Tensor:
    """This rank's rows of a table drawn in chunks of about ``drawn`` elements."""
    table = DividedTable(TableRows(rows, width, mesh.data.size), mesh.data)
    with mock.patch("tierstore.model.tables._DRAWN", drawn):
        return table.first_rows(std=0.2, generator=torch.Generator().manual_seed(3))
