"""Fine-tuning with Hugging Face's Trainer, from a configuration instead of a checkpoint."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from optexp.integrations.transformers import OptexpCallback


class Sentences(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.randint(1, 50, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": index % 2}


config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    training_args = TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer = Trainer(BertForSequenceClassification(config), training_args, train_dataset=Sentences())
    trainer.add_callback(OptexpCallback(trainer))
    trainer.train()
