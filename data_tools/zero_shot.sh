#!/usr/bin/env bash
# The seven zero-shot sets, from the hub, each into DATA/NAME: data_tools/zero_shot.sh [DATA]
# LM1B's test split is made with the tokenizer and length of the models that are evaluated on it.
set -euo pipefail
data=${1:-data}
for name in ptb wikitext lambada ag_news pubmed arxiv; do
    lomdm prepare "$name" --out "$data/$name"
done
lomdm prepare lm1b --splits valid --tokenizer gpt2 --length 1024 --out "$data/lm1b_zero_shot"
