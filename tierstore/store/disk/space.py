"""The disk space that a store reserves before it is needed."""

from __future__ import annotations

from tierstore.store.format import Group, RecordSchema


def copies(retain: int) -> int:
    """Copies of every trained record that space is reserved for: the live one, the last commit's, and ``retain`` snapshots'.

    Training that touches everything needs them all: what the last commit or a snapshot refers to is never overwritten.
    """
    return 2 + retain


def schema_copies(schema: RecordSchema, copies: int) -> int:
    """Of ``copies`` copies, those that records of ``schema`` need: of frozen ones, which are written once, a single one."""
    return min(copies, 1) if schema.frozen else copies


def extent_bytes(schema: RecordSchema, records: int, retain: int) -> int:
    """Bytes of the extents of ``records`` records, padding and copies included."""
    slot = sum(schema.layout(group).slot_bytes for group in schema.groups)
    return slot * records * schema_copies(schema, copies(retain))


def scratch_bytes(schema: RecordSchema, records: int) -> int:
    """Bytes of the file that the gradients of ``records`` records spill to."""
    return schema.layout(Group.GRADIENTS).slot_bytes * records
