"""How good the model is: perplexity, and the overlap of its text with a reference (BLEU, ROUGE).

Each is written out from its paper and equal to the tool whose numbers are published: `sacrebleu` for BLEU,
`rouge-score` for ROUGE, a loop that scores one token at a time for perplexity.
"""

from .bleu import Bleu, bleu
from .perplexity import Perplexity, perplexity
from .rouge import Score, rouge

__all__ = ["Bleu", "Perplexity", "Score", "bleu", "perplexity", "rouge"]
