"""Writes quickstart.parquet beside this file: 32 prompts of eight tasks.

    .venv/bin/python configs/data/make_quickstart.py

Half of the tasks copy or rework their input (summarise, edit, extract, code), where drafts from the prompt match; in
the other half (passage, list, maths, chat) the model is on its own.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LIGHTHOUSE = (
    "The lighthouse at Gull Point was built in 1874 from granite that was cut on the mainland and shipped across the "
    "bay in calm weather. For ninety years a keeper and two assistants lived in the tower and lit the lamp at dusk. In "
    "1964 the lamp was made electric and the last keeper moved to the village, where she opened a small bakery. Today "
    "volunteers open the tower on Sundays, and visitors may climb the 142 steps to the gallery."
)
BRIDGE = (
    "The council met on Monday to discuss the old footbridge over the mill stream. An inspection in March found rot in "
    "three of the main beams, so the bridge has been closed since April. A new wooden bridge would cost 40,000 and "
    "last twenty years; a steel bridge would cost 65,000 and last sixty. The council will decide in September, after "
    "it has heard from the people who live nearby."
)
BEES = (
    "Honey bees keep the middle of their nest at about 35 degrees all year. In summer they fan their wings at the "
    "entrance and bring in drops of water, which cool the air as they dry. In winter they form a tight ball around the "
    "queen and shiver with their flight muscles. The bees on the outside slowly move in, and those inside move out, so "
    "that none of them gets too cold."
)
TRAIN = (
    "The night train from Lisburg leaves at 21:40 from platform 6 and reaches Hartwell at 07:15. A seat costs 39, a "
    "bunk in a cabin of four costs 69, and a cabin for one costs 145. Breakfast is part of the cabin price. Bicycles "
    "must be booked two days before and cost 12. Dogs travel free of charge in the last car."
)
AVERAGE = """def average(numbers):
    total = 0
    for number in numbers:
        total = total + number
    return total / len(numbers)"""
COUNTER = """def count_words(text):
    counts = {}
    for word in text.split():
        if word in counts:
            counts[word] = counts[word] + 1
        else:
            counts[word] = 1
    return counts"""
STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()"""
BUBBLE = """def sort(values):
    for i in range(len(values)):
        for j in range(len(values) - 1):
            if values[j] > values[j + 1]:
                values[j], values[j + 1] = values[j + 1], values[j]
    return values"""

PROMPTS = {
    "summarise": [
        f"Summarise this text in two sentences.\n\n{LIGHTHOUSE}",
        f"Summarise the text below for someone who has ten seconds.\n\n{BRIDGE}",
        f"Give the three main points of this text as a list.\n\n{BEES}",
        f"Shorten this notice to half its length and keep all prices.\n\n{TRAIN}",
    ],
    "edit": [
        f"Copy this text and change every year to the year before it.\n\n{LIGHTHOUSE}",
        f"Copy this text and replace the word bridge with the word path.\n\n{BRIDGE}",
        "Correct the spelling and repeat the whole text: The wether was beautifull on saturday, so we desided to walk "
        "along the rivver to the old mil. Their we ate our sandwitches and watched the ducks untill it began to rain.",
        "Rewrite this message in a more formal tone: Hi Sam, can't make it on Tuesday, the car broke down again. Could "
        "we meet on Thursday instead, same time, same place? I'll bring the plans for the garden. Thanks!",
    ],
    "extract": [
        f"List every number in this text with what it stands for.\n\n{LIGHTHOUSE}",
        f"Write the dates and prices in this text as a table with two columns.\n\n{BRIDGE}",
        f"Write this timetable as JSON with the keys from, to, departure, arrival and prices.\n\n{TRAIN}",
        f"Quote the sentences of this text that speak of winter, word for word.\n\n{BEES}",
    ],
    "code": [
        f"Add type hints and a docstring to this function and show all of it.\n\n{AVERAGE}",
        f"Rewrite this function so that it ignores upper and lower case. Show the whole function.\n\n{COUNTER}",
        f"Add a method peek that returns the last item without removing it. Show the whole class.\n\n{STACK}",
        f"Add a comment to every line of this function.\n\n{BUBBLE}",
    ],
    "passage": [
        f"How many steps lead to the gallery?\n\n{LIGHTHOUSE}",
        f"Why was the bridge closed, and when will the council decide?\n\n{BRIDGE}",
        f"How do bees keep warm in winter?\n\n{BEES}",
        f"What does a cabin for one cost, and what does that price include?\n\n{TRAIN}",
    ],
    "list": [
        "Name five vegetables that grow in a cool climate, with one sentence about each.",
        "Write a packing list for a weekend in the mountains.",
        "Give six ideas for a rainy afternoon with two children.",
        "List the months of the year with the number of days of each.",
    ],
    "maths": [
        "A shop sells pencils at 3 for 2 dollars. How much do 12 pencils cost? Explain each step.",
        "Count from 1 to 30 in steps of 3.",
        "A train travels 180 kilometres in 2 hours. How far does it travel in 5 hours at the same speed?",
        "Write the multiplication table of 7 from 7 x 1 to 7 x 10.",
    ],
    "chat": [
        "What is the difference between a lake and a pond?",
        "Write a short story about a fox who learns to swim.",
        "Explain to a child why the sky is blue.",
        "I have an interview tomorrow and I am nervous. What should I do tonight?",
    ],
}

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("task", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ]
)


def table() -> pa.Table:
    """One row per prompt; ids are `<task>-<number>`."""
    rows = [
        {"id": f"{task}-{number}", "task": task, "messages": [{"role": "user", "content": prompt}]}
        for task, prompts in PROMPTS.items()
        for number, prompt in enumerate(prompts, start=1)
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


if __name__ == "__main__":
    pq.write_table(table(), Path(__file__).with_name("quickstart.parquet"))
