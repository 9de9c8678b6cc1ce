"""Configuration of a masked diffusion language model (LoMDM and its relatives), or its causal baseline."""

from transformers import PretrainedConfig


class LomdmConfig(PretrainedConfig):
    """The objective, in the trainer's own words, says in which order text is masked:

    objective                "lomdm": learned, two heads; "genmd4": an exponent a token; "mdlm": random;
                             "window": a fixed order; "ar": from left to right, causal
    c1, c2, normalize, head  lomdm: exponents c1 + c2 NORMALIZE(g), "norm_sig" or "softmax"; the heads are a
                             "transformer" block and a linear layer, or "linear", that layer alone
    schedule                 lomdm: "power", or "polynomial" (MuLAN's, without exponents)
    stop_gradient            lomdm: whether, in training, the heads' gradients ended at the features
    order, permutation, block, window_eps   window: "left_to_right", "permutation" (of positions, in the order
                             of generation) or "blocks"; the share of masking outside a position's window

    max_position_embeddings  the length of the training sequences
    condition_width          of the constant adaLN condition
    never_token_ids          ids that are not text, and never drawn: padding, and those that no token has
    packing                  of the training sequences: "packed" (documents end to end, EOS after each),
                             "wrapped" (the same, BOS and EOS around each sequence) or "padded" (one document
                             a sequence, EOS, then padding)
    attend                   "sequence", or "document": a token sees its own document only
    subs                     what `logits` are by default (see LomdmForMaskedLM.forward)
    """

    model_type = "lomdm"

    def __init__(
        self,
        vocab_size=50258,
        mask_token_id=50257,
        pad_token_id=None,
        eos_token_id=50256,
        never_token_ids=None,
        max_position_embeddings=1024,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        condition_width=128,
        objective="lomdm",
        c1=0.7,
        c2=0.65,
        schedule="power",
        normalize="norm_sig",
        head="transformer",
        stop_gradient=True,
        order="left_to_right",
        permutation=None,
        block=16,
        window_eps=1e-4,
        packing="packed",
        attend="sequence",
        subs=False,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.mask_token_id = mask_token_id
        if never_token_ids is None:  # as exports before there was such a list
            never_token_ids = [pad_token_id] if pad_token_id not in (None, eos_token_id) else []
        self.never_token_ids = never_token_ids
        self.max_position_embeddings = max_position_embeddings
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.condition_width = condition_width
        self.objective = objective
        self.c1 = c1
        self.c2 = c2
        self.schedule = schedule
        self.normalize = normalize
        self.head = head
        self.stop_gradient = stop_gradient
        self.order = order
        self.permutation = permutation
        self.block = block
        self.window_eps = window_eps
        self.packing = packing
        self.attend = attend
        self.subs = subs
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
