"""Makes the store of a training run over for another layout of ranks: ``reshard``."""

from tierstore.train.resharding.making import Resharded, VocabularyPlacement, reshard

__all__ = ["Resharded", "VocabularyPlacement", "reshard"]
