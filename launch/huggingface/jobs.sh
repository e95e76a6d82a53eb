#!/usr/bin/env bash
# One training on a machine of Hugging Face Jobs, whose output directory is in a bucket of the hub.
#
#   BUCKET=me/runs IMAGE=registry.example.com/hfscale:0.1.0 launch/huggingface/jobs.sh
#   BUCKET=me/runs IMAGE=… FLAVOR=h200x8 GPUS_PER_NODE=8 CONFIG_FILE=accelerate_configs/ddp.yaml \
#       launch/huggingface/jobs.sh recipes/ddp/train.py --config recipes/ddp/qwen3-1.7b-full.yaml \
#       --output_dir /runs/qwen3-1.7b-full
#
# When: one machine with up to 8 GPUs, and an account with Jobs (`hf auth login`). `hf jobs hardware` lists flavors and prices.
# Edit: nothing. The image is launch/docker/Dockerfile's, in a registry from which Jobs can read. DRY_RUN=1 prints the job.
# It has not run on Jobs: the tests have `hf jobs run --dry-run` read the command.
# `hf jobs uv run` installs a script's requirements from an index, where hfscale is not yet, and not the image's lock file.
#
#   BUCKET          OWNER/NAME of a bucket of the hub; it is mounted as /runs, and --output_dir must lie there
#   IMAGE           the image
#   FLAVOR          the machine (default a100x8)
#   GPUS_PER_NODE   its GPUs (default 8)
#   TIMEOUT         the longest time of an attempt (default 24h); a job that is out of time is killed without a notice
#   ATTEMPTS        starts at most (default 20); each resumes from the newest checkpoint in the bucket
#   CONFIG_FILE     an Accelerate config (default accelerate_configs/fsdp2.yaml)
set -euo pipefail

fail() {
  echo "jobs.sh: error: $1" >&2
  exit 2
}

for name in BUCKET IMAGE; do
  [[ -n ${!name:-} ]] || fail "$name is not set: see the top of $0"
done
[[ $BUCKET =~ ^[^/[:space:]]+/[^/[:space:]]+$ ]] || fail "BUCKET=$BUCKET is not OWNER/NAME"
(($# > 0)) || set -- recipes/sharded/train.py --config recipes/sharded/llama-3.1-8b-full.yaml \
  --output_dir /runs/llama-3.1-8b-full
[[ " $* " =~ \ --output_dir[\ =]/runs/ ]] || fail "--output_dir does not lie in /runs, the only folder that is kept"

options=(--flavor "${FLAVOR:-a100x8}" --timeout "${TIMEOUT:-24h}" --attempts "${ATTEMPTS:-20}")
options+=(--volume "hf://buckets/$BUCKET:/runs" --secrets HF_TOKEN --env HF_HOME=/runs/huggingface)
options+=(--env MAIN_IP=127.0.0.1 --env MAIN_PORT=29500 --env NODE_RANK=0 --env NODES=1)
options+=(--env "GPUS_PER_NODE=${GPUS_PER_NODE:-8}")
options+=(--env "CONFIG_FILE=${CONFIG_FILE:-accelerate_configs/fsdp2.yaml}")
[[ -z ${DRY_RUN:-} ]] || options+=(--dry-run)

# The command replaces the image's entry point, so it names the script again.
exec "${HF:-hf}" jobs run "${options[@]}" "$IMAGE" /workspace/launch/multinode/accelerate.sh "$@"
