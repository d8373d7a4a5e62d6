"""Make the README's picture: the memory of one fine-tuning step, estimated and measured, on the measured card."""

from pathlib import Path

import llmlab as lab

OUT = Path(__file__).resolve().parent.parent / "book" / "_static" / "comparison.png"


def main() -> None:
    published = lab.records("TinyLlama/TinyLlama-1.1B-Chat-v1.0", gpu="T4", source="published")
    report = next(r for r in published if r.run.attention == "eager" and r.run.seq_len == 2048 and r.phases)
    picture = lab.compare(report.model, report.run, "T4").plot()
    picture.savefig(OUT, dpi=150, metadata={"Software": None})
    print(OUT)


if __name__ == "__main__":
    main()
