"""Fine-tuning a sequence classifier in Hugging Face's Trainer with its body frozen. Random weights, no download.

python examples/sequence_classification.py
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import unlazy as ul
from unlazy.scope.adapters.huggingface import ScopeCallback

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def main(steps: int = 100, run: str | None = None, freeze: bool = True) -> ul.Verdict:
    set_seed(0)
    tokens = torch.randint(0, 30, (512, 8))
    labels = (tokens[:, 0] > 14).long()
    # Yours: BertForSequenceClassification.from_pretrained("checkpoints/mine")
    model = BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=8, **SIZES))
    if freeze:
        model.bert.encoder.layer[0].requires_grad_(False)
        model.bert.embeddings.requires_grad_(False)
    watch = ScopeCallback(({"input_ids": tokens[:64]}, labels[:64]), run)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        rows = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[watch]).train()
    assert watch.scope is not None
    return watch.scope.verdict()


if __name__ == "__main__":
    print(main())
