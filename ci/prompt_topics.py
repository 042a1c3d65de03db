"""What people ask a model for beside code: tasks and the topics that they can have."""

from itertools import product

TASKS = (
    "Explain {} to a child.",
    "What should a beginner know about {}?",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Write an opening paragraph of a blog post about {}.",
    "Write a polite email to a colleague about {}.",
    "Write a persuasive speech about {}.",
    "Give five tips about {}.",
    "List the advantages and disadvantages of {}.",
    "Summarize the most important facts about {}.",
    "Describe {} vividly, using all five senses.",
    "Imagine you are a teacher. Prepare a lesson about {}.",
    "Imagine you are a journalist. Ask an expert ten questions about {}.",
    "Write a dialogue between two friends who disagree about {}.",
    "How has {} changed in the last hundred years?",
    "What are common mistakes about {}, and how does one avoid them?",
    "Make a plan for a week with {}.",
    "Compare {} with something that everybody knows.",
    "What questions about {} are still open?",
    "Why does {} matter? Give three reasons.",
    "Draft a short newspaper article on {}.",
    "Tell a joke about {}, and explain it.",
    "Extract the key terms that one needs to talk about {}, as a list.",
    "What would the world be like without {}?",
)
TOPICS = (
    "climate change", "learning a language", "public speaking", "a travel to Japan", "chess",
    "healthy food", "the solar system", "black holes", "vaccines", "photosynthesis",
    "a lost letter", "an old lighthouse", "the first day at school", "a robot that dreams",
    "saving money", "buying a house", "stock markets", "inflation", "international trade",
    "remote work", "job interviews", "leading a team", "time management", "sleep",
    "running a marathon", "yoga", "football", "the Olympic Games", "classical music", "jazz",
    "painting", "photography", "cooking pasta", "baking bread", "growing tomatoes", "bees",
    "cats and dogs", "whales", "rainforests", "volcanoes", "earthquakes", "the water cycle",
    "electric cars", "bicycles in cities", "trains", "airplanes", "bridges", "the internet",
    "privacy online", "computer games", "machine learning", "databases", "encryption",
    "probability", "prime numbers", "the Pythagorean theorem", "fractions", "statistics",
    "the French Revolution", "the Roman Empire", "the printing press", "the moon landing",
    "democracy", "human rights", "philosophy", "happiness", "friendship", "moving to a new city",
    "a family dinner", "a surprise party", "rain in the afternoon", "winter mornings",
)  # fmt: skip


def everyday() -> list[str]:
    """Every task with every topic."""
    return [task.format(topic) for task, topic in product(TASKS, TOPICS)]
