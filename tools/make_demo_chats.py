"""Make the chats that ship with the demo: our own prompts, answered by SmolLM2-135M-Instruct.

    python tools/make_demo_chats.py --out src/fledge/demo/chats.jsonl [--device cuda]

Answers are greedy, in float32, with the model's default system prompt; an answer that did not end
within the limit is marked `finish: length`. The prompts are written for this project.
With `--prompts FILE` the user turns come from that file instead (for benchmarks).
"""

import argparse
import itertools
import json
import random
import time
from pathlib import Path


def _list(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(";")]


ANIMALS = _list("""\
fox; owl; hedgehog; otter; rabbit; badger; squirrel; beaver; sparrow; turtle;
kitten; puppy; mouse; frog; duckling; bear; wolf; deer; raccoon; swan; goat; pony; lamb; crow;
penguin; dolphin; seal; whale; robin; mole; hamster; parrot; lizard; crab; bee; ladybug; snail;
moth; firefly; donkey""")
TRAITS = _list("""\
brave; shy; curious; clever; kind; sleepy; lonely; cheerful; stubborn; gentle;
forgetful; tiny""")
WISHES = [
    "wanted to learn to sing",
    "found a map in an old tree",
    "got lost in the snow",
    "wanted to make a new friend",
    "was afraid of the dark",
    "dreamed of flying",
    "built a little boat",
    "helped a neighbour in need",
    "lost a favourite red scarf",
    "followed a strange light",
    "planted a magic seed",
    "had to cross a wide river",
]
ACTIVITIES = _list("""\
sleeping better; learning a new language; keeping houseplants alive; saving money
every month; cooking rice; staying calm before an exam; packing a suitcase; writing a thank-you
note; running a first race; making good coffee; keeping a desk tidy; reading more books; growing
tomatoes; training a puppy; taking better photos; remembering names; drinking more water; waking up
early; giving a short speech; planning a birthday party; riding a bicycle in the city; baking bread;
looking after a cat; learning to draw; hiking in the mountains; cleaning a kitchen; starting a
diary; making new friends; using less plastic; swimming faster; playing the guitar; washing wool;
choosing a gift; camping in the rain; studying with friends; eating more vegetables; fixing a flat
tyre; working from home; keeping a budget; learning to juggle; painting a room; repairing a chair;
feeding garden birds; making soup; telling a joke; learning chess; writing a poem; cutting hair at
home; keeping bees; building a sandcastle""")
THINGS = _list("""\
a rainbow; gravity; a volcano; photosynthesis; an eclipse; a magnet; the water cycle; a
computer program; a vaccine; an earthquake; the internet; a battery; an atom; a glacier; a fossil;
evolution; a telescope; the moon; a hurricane; electricity; a desert; a coral reef; a shadow; an
echo; friction; a comet; a compass; a lens; salt; steam; a bridge; a library; a budget; a contract;
a vote; a map; a calendar; a recipe; a novel; a symphony; an algorithm; a robot; a satellite; a
microscope; a clock; a seed; a hive; a migration; a tide; an island""")


def demo_prompts(stories: int, seed: int = 0) -> list[str]:
    """Short stories above all, with some tips and explanations: one voice a draft can learn."""
    rng = random.Random(seed)
    combinations = list(itertools.product(TRAITS, ANIMALS, WISHES))
    prompts = [
        f"Write a short story about a {trait} {animal} who {wish}."
        for trait, animal, wish in rng.sample(combinations, stories)
    ]
    prompts += [f"Give me three tips for {a}." for a in ACTIVITIES]
    prompts += [f"Explain what {thing} is in simple words." for thing in THINGS]
    rng.shuffle(prompts)
    return prompts


def answer(rows, model_dir, *, device, batch, max_new_tokens, out):
    """Greedy answers, longest prompts first, written in the order of the prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device).eval()
    ids = [
        tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for row in rows
    ]
    order = sorted(range(len(rows)), key=lambda i: -len(ids[i]))
    done = {}
    start = time.perf_counter()
    for begin in range(0, len(order), batch):
        which = order[begin : begin + batch]
        padded = tokenizer.pad({"input_ids": [ids[i] for i in which]}, return_tensors="pt").to(
            device
        )
        with torch.inference_mode():
            tokens = model.generate(**padded, max_new_tokens=max_new_tokens, do_sample=False)
        for i, new in zip(which, tokens[:, padded["input_ids"].shape[1] :].tolist(), strict=True):
            ended = tokenizer.eos_token_id in new
            new = new[: new.index(tokenizer.eos_token_id)] if ended else new
            reply = {"role": "assistant", "content": tokenizer.decode(new)}
            finish = "stop" if ended else "length"
            done[i] = {**rows[i], "messages": [*rows[i]["messages"], reply], "finish": finish}
        total = sum(len(row["messages"][-1]["content"]) for row in done.values())
        print(
            f"{len(done)}/{len(rows)} rows, {total} characters, {time.perf_counter() - start:.0f} s"
        )
    out.write_text(
        "".join(json.dumps(done[i], ensure_ascii=False) + "\n" for i in range(len(rows)))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stories", type=int, default=900)
    parser.add_argument("--prompts", type=Path, help="JSONL with `messages`, instead of ours")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    args = parser.parse_args()
    from fledge.models.resolve import local_model

    if args.prompts:
        rows = [json.loads(line) for line in args.prompts.read_bytes().splitlines()]
    else:
        rows = [
            {"id": f"demo/{i}", "messages": [{"role": "user", "content": prompt}]}
            for i, prompt in enumerate(demo_prompts(args.stories))
        ]
    answer(
        rows,
        local_model(args.model),
        device=args.device,
        batch=args.batch,
        max_new_tokens=args.max_new_tokens,
        out=args.out,
    )


if __name__ == "__main__":
    main()
