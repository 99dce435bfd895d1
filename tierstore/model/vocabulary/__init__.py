"""Tables over the vocabulary whose rows are divided over the data ranks: the embedding, and the head's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.model.vocabulary.cost import VocabularyCost
    from tierstore.model.vocabulary.partition import VocabularyPartition
    from tierstore.model.vocabulary.table import DividedTable
else:
    __getattr__, __dir__ = exports(__name__, __file__)
