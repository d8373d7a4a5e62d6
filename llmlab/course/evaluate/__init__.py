"""Quality metrics of language models: perplexity, and the overlap of generated text with a reference (BLEU, ROUGE).

Each is written from its paper, and tests hold its numbers to those of the usual tool: `sacrebleu` for BLEU,
`rouge-score` for ROUGE, and for perplexity a loop that scores one token at a time.
"""

from .bleu import Bleu, bleu
from .perplexity import Perplexity, perplexity, small_perplexity
from .rouge import Score, rouge

__all__ = ["Bleu", "Perplexity", "Score", "bleu", "perplexity", "rouge", "small_perplexity"]
