#!/usr/bin/env bash
# The seven zero-shot sets, from the hub, each into DATA/NAME: data_tools/zero_shot.sh DATA [OPTIONS]
# For other models than those of OpenWebText: data_tools/zero_shot.sh data --tokenizer data/mine/tokenizer --length 128
set -euo pipefail
data=${1:-data}
shift || true
for name in ptb wikitext lambada ag_news pubmed arxiv; do
    lomdm prepare "$name" --out "$data/$name" "$@"
done
lomdm prepare lm1b --splits valid --tokenizer gpt2 --length 1024 --out "$data/lm1b_zero_shot" "$@"
