"""Configuration of a LoMDM or MDLM masked diffusion language model."""

from transformers import PretrainedConfig


class LomdmConfig(PretrainedConfig):
    """`objective` is "lomdm" (learned order, exponents c1 + c2 NormSig) or "mdlm" (c1 = 1, c2 = 0).

    max_position_embeddings  the length of the training sequences
    condition_width          of the constant adaLN condition
    packing                  of these: "packed" (documents end to end, EOS after each), "wrapped" (the same,
                             BOS and EOS around each sequence) or "padded" (one document a sequence, EOS,
                             then padding)
    attend                   "sequence", or "document": a token sees its own document only
    """

    model_type = "lomdm"

    def __init__(
        self,
        vocab_size=50258,
        mask_token_id=50257,
        pad_token_id=None,
        eos_token_id=50256,
        max_position_embeddings=1024,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        condition_width=128,
        objective="lomdm",
        c1=0.7,
        c2=0.65,
        packing="packed",
        attend="sequence",
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.mask_token_id = mask_token_id
        self.max_position_embeddings = max_position_embeddings
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.condition_width = condition_width
        self.objective = objective
        self.c1 = c1
        self.c2 = c2
        self.packing = packing
        self.attend = attend
        super().__init__(
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
        # what `transformers` versions hand on differs; these three must arrive in all of them
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id
        self.tie_word_embeddings = tie_word_embeddings
