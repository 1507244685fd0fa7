"""`Seq2SeqTrainer` that predicts with a cache of 128 tokens per layer; training itself uses no cache."""

from tempfile import TemporaryDirectory
from typing import Any

from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

model, tokenizer = embedded.load()
samples = make_samples("kv_recall", tokenizer, length=512, count=4, seed=1)
questions = [tokenizer(sample.prompt) for sample in samples]
texts = [tokenizer(f"{sample.prompt} {sample.answers[0]}") for sample in samples]


class PagedTrainer(Seq2SeqTrainer):
    """Gives every batch a cache of its own."""

    def prediction_step(self, *args: Any, **settings: Any) -> Any:
        cache = PagedEvictionCache(self.model.config, budget=128, policy="keydiff")
        return super().prediction_step(*args, cache=cache, **settings)


how = {"max_steps": 1, "learning_rate": 1e-5, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
with TemporaryDirectory() as folder:
    trainer = PagedTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(folder, predict_with_generate=True, use_cpu=True, **how),
        train_dataset=[{**text, "labels": text.input_ids} for text in texts],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.data_collator = DataCollatorWithPadding(tokenizer)  # the questions have no labels
    predicted = trainer.predict(questions, max_new_tokens=4)
width = max(len(question.input_ids) for question in questions)
answers = tokenizer.batch_decode(predicted.predictions[:, width:].clip(0))  # the trainer fills up with -100
print(answers, [sample.answers[0] for sample in samples], sep="\n")
