"""TokenCounter: what enters a model in training is counted once, however the model is called."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import LENGTH, tiny_model, tiny_trainer
from torch import nn
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hfscale.core.versions import enable_recomputation
from hfscale.metrics.tokens import TokenCounter
from hfscale.trainer.batches import batch_entries, is_compiled

ROWS = 4
IDS = torch.randint(3, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [8], [4], [4]])).long()
BERT = BertConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
)


def t5():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def whisper():
    config = WhisperConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=10,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    return WhisperForConditionalGeneration(config)


def attached(tmp_path, model):
    """A counter on the entries of a Trainer's model in training mode, and the module that the Trainer calls."""
    trainer = tiny_trainer(tmp_path, model=model.train())
    counter = TokenCounter()
    counter.attach(batch_entries(trainer))
    return counter, trainer.model_wrapped


class Features(nn.Module):
    """A model that is called with a dictionary, like SentenceTransformer."""

    def __init__(self, encoder):
        super().__init__()
        self.transformer = Transformer(encoder)

    def forward(self, features):
        return self.transformer(features)


class Transformer(nn.Module):
    """Calls the forward of its model as a method, like the module of this name in sentence-transformers."""

    def __init__(self, encoder):
        super().__init__()
        self.model = encoder

    def forward(self, features):
        return self.model.forward(**features).last_hidden_state.mean(1)


def test_a_sequence_counts_once_beside_reference_and_evaluation_passes(tmp_path):
    counter, model = attached(tmp_path, tiny_model())
    with torch.no_grad():
        model(input_ids=IDS)
        model.generate(IDS[:, :4], max_new_tokens=2, do_sample=False)
    model(input_ids=IDS)
    model.eval()(input_ids=IDS)
    counts = counter.take()
    assert (counts.tokens, counts.samples) == (IDS.numel(), ROWS)
    assert counter.take().tokens == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model(IDS, MASK),
        lambda model: model(input_ids=IDS, attention_mask=MASK, labels=IDS),
        lambda model: model(inputs_embeds=model.get_input_embeddings()(IDS), attention_mask=MASK),
        lambda model: model.model(input_ids=IDS, attention_mask=MASK),  # trainers with their own head do this
    ],
)
def test_padding_is_known_from_the_mask(tmp_path, call):
    counter, model = attached(tmp_path, tiny_model())
    for _ in range(2):
        call(model)
    counts = counter.take()
    assert counts.tokens == counter.tokens == 2 * IDS.numel()
    assert counts.padding == 2 * (IDS.numel() - int(MASK.sum()))
    assert counts.unmasked == 0
    assert counts.attended / counts.main_tokens == LENGTH


def test_a_compiled_model_is_traced_once(tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.compile(tiny_model(), backend="eager")
    counter, model = attached(tmp_path, model)
    assert is_compiled(model)
    for _ in range(3):
        model(IDS, attention_mask=MASK)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    counts = counter.take()
    assert counts.tokens == 3 * IDS.numel()
    assert counts.padding == 3 * (IDS.numel() - int(MASK.sum()))
    model.model(input_ids=IDS)
    assert counter.take().tokens == IDS.numel()


def test_without_a_mask_padding_is_unknown(tmp_path):
    counter, model = attached(tmp_path, tiny_model())
    model(input_ids=IDS)
    assert counter.take().unmasked == IDS.numel()


def test_packed_sequences_are_told_apart_by_their_positions(tmp_path):
    counter, model = attached(tmp_path, tiny_model())
    positions = torch.cat([torch.arange(10), torch.arange(6)])[None]
    model(input_ids=IDS[:1], position_ids=positions)
    counts = counter.take()
    assert (counts.tokens, counts.samples, counts.padding, counts.unmasked) == (LENGTH, 2, 0, 0)
    assert counts.attended == 10**2 + 6**2


def test_single_tokens_are_the_padding_of_packed_sequences(tmp_path):
    counter, model = attached(tmp_path, tiny_model())
    positions = torch.stack([torch.cat([torch.arange(9), torch.arange(5), torch.tensor([0, 0])]), torch.arange(16)])
    model(input_ids=IDS[:2], position_ids=positions)
    counts = counter.take()
    assert (counts.tokens, counts.samples, counts.padding, counts.unmasked) == (2 * LENGTH, 3, 2, 0)
    assert counts.attended == 9**2 + 5**2 + 2 + 16**2


def test_encoder_and_decoder_both_count(tmp_path):
    labels = torch.where(torch.arange(6) < 5, IDS[:, :6], -100)
    for wrap in (lambda m: m, lambda m: get_peft_model(m, LoraConfig(r=2, target_modules=["q", "v"]))):
        counter, model = attached(tmp_path, wrap(t5()))
        model(input_ids=IDS, attention_mask=MASK, labels=labels)
        counts = counter.take()
        assert counts.tokens == IDS.numel() + labels.numel()
        assert counts.padding == IDS.numel() - int(MASK.sum()) + ROWS
        assert (counts.samples, counts.main_tokens) == (ROWS, IDS.numel())


def test_speech_to_text_has_the_tokens_of_its_decoder(tmp_path):
    counter, model = attached(tmp_path, whisper())
    model(input_features=torch.randn(ROWS, 8, 20), labels=IDS[:, :6])
    counts = counter.take()
    assert (counts.tokens, counts.samples) == (ROWS * 6, ROWS)


def test_images_are_samples_without_tokens(tmp_path):
    config = ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    counter, model = attached(tmp_path, ViTForImageClassification(config))
    model(torch.randn(ROWS, 3, 16, 16), labels=torch.zeros(ROWS, dtype=torch.long))
    counts = counter.take()
    assert (counts.tokens, counts.samples) == (0, ROWS)
    assert counter.inputs == ("pixel_values", "labels")


def test_each_forward_of_the_transformer_inside_counts_where_a_dictionary_is_given(tmp_path):
    counter, model = attached(tmp_path, Features(BertModel(BERT)))
    for _ in range(2):
        model({"input_ids": IDS, "attention_mask": MASK})
    counts = counter.take()
    assert (counts.tokens, counts.samples) == (2 * IDS.numel(), 2 * ROWS)
    assert counts.padding == 2 * (IDS.numel() - int(MASK.sum()))


class Pairs(Features):
    """A model that gets a dictionary for each text, in one dictionary, by keywords or in a list."""

    def forward(self, batch=None, scale=1.0, **texts):
        if isinstance(batch, dict):
            texts = batch
        elif batch is not None:
            texts = dict(enumerate(batch))
        return [self.transformer(features) for features in texts.values()]


@pytest.mark.parametrize(
    "call",
    [
        lambda model, text: model({"query": text, "passage": text}),
        lambda model, text: model(query=text, passage=text, scale=2.0),
        lambda model, text: model([text, text]),
        lambda model, text: model(batch={"query": text, "passage": text}),
    ],
)
@pytest.mark.parametrize("encoder", [BertModel(BERT), nn.Linear(2, 2)])
def test_dictionaries_of_dictionaries_count(tmp_path, caplog, call, encoder):
    """With transformers inside, which count what they get, and without."""
    counter, model = attached(tmp_path, Pairs(encoder))
    if isinstance(encoder, nn.Linear):
        model.transformer.forward = lambda features: features["input_ids"]
    call(model, {"input_ids": IDS, "attention_mask": MASK})
    counts = counter.take()
    assert (counts.tokens, counts.samples) == (2 * IDS.numel(), 2 * ROWS)
    assert counts.padding == 2 * (IDS.numel() - int(MASK.sum()))
    assert caplog.messages == []


def test_outputs_of_an_encoder_are_no_batch(tmp_path):
    counter, model = attached(tmp_path, t5())
    outputs = model.get_encoder()(input_ids=IDS)
    counter.take()
    model(encoder_outputs=outputs, labels=IDS)
    assert counter.take().tokens == IDS.numel()


def test_a_batch_that_cannot_be_counted_is_reported_once(tmp_path, caplog):
    class Opaque(nn.Module):
        def forward(self, batch):
            return batch.values

    counter, model = attached(tmp_path, Opaque())
    for _ in range(2):
        model(SimpleNamespace(values=IDS))
    assert counter.take().tokens == 0
    assert [line for line in caplog.messages if "Opaque gets no tensor by name" in line] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_dictionary_counts_in_a_model_without_transformers_inside(tmp_path):
    counter, model = attached(tmp_path, Features(nn.Linear(2, 2)))
    model.forward = lambda features: features["input_ids"]
    model({"input_ids": IDS})
    assert counter.take().tokens == IDS.numel()


def test_every_choice_counts(tmp_path):
    counter, model = attached(tmp_path, BertForMultipleChoice(BERT))
    model(input_ids=torch.stack([IDS, IDS], 1), labels=torch.zeros(ROWS, dtype=torch.long))
    assert counter.take().tokens == 2 * IDS.numel()


def test_recomputed_layers_do_not_count(tmp_path):
    model = tiny_model()
    enable_recomputation(model)
    counter, model = attached(tmp_path, model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert counter.take().tokens == IDS.numel()


def test_an_exception_in_a_forward_does_not_stop_the_count(tmp_path):
    counter, model = attached(tmp_path, tiny_model())
    with pytest.raises(IndexError):
        model(input_ids=IDS + 1000)
    counter.take()
    model(input_ids=IDS)
    assert counter.take().tokens == IDS.numel()


def test_wrappers_that_are_not_compiled_are_no_entries():
    model = tiny_model()
    accelerator = SimpleNamespace(state=SimpleNamespace(distributed_type=None))
    trainer = SimpleNamespace(
        model=model, model_wrapped=nn.Sequential(), accelerator=accelerator, args=SimpleNamespace(world_size=2)
    )
    trainer.model_wrapped.module = model
    assert [entry.module for entry in batch_entries(trainer)] == [model, model.model]
