"""Recipes, as files and as overrides."""

from fledge.recipe.schema import load_recipe, recipe_shapes
from fledge.recipe.yaml_text import parse_yaml
from fuzz.caches import BEFORE
from fuzz.mutate import HOSTILE, hostile_yaml
from fuzz.survive import Case


class RecipeFile(Case):
    examples = 150

    def build(self):
        text = (BEFORE / "eagle3" / "recipe.yaml").read_bytes()
        (self.place / "recipe.yaml").write_bytes(text)
        self.document = parse_yaml(text, where="recipe")[0]

    def spoil(self, rng):
        (self.place / "recipe.yaml").write_bytes(hostile_yaml(self.document, rng))

    def read(self):
        recipe = load_recipe(self.place / "recipe.yaml")
        assert load_recipe(None).differences(recipe) is not None
        assert recipe.to_yaml()


class Override(Case):
    examples = 150

    def build(self):
        self.words = ["training.lr=1e-4"]
        self.known = [
            f"{name}.{key}" for name, shape in recipe_shapes().items() for key in shape.all_keys()
        ]

    def spoil(self, rng):
        ends = ("", ".x", ".kind", ".a.b.c")
        yaml = ("[" * 500, "&a [*a]", "{a: 1, a: 2}", "!!python/name:os.system", "'", "1e999", "{")
        values = [*map(str, HOSTILE), *yaml]
        self.words = [
            f"{rng.choice(self.known)}{rng.choice(ends)}={rng.choice(values)}"
            for _ in range(rng.randint(1, 3))
        ]

    def restore(self):
        self.words = ["training.lr=1e-4"]

    def read(self):
        assert load_recipe(None, self.words).to_yaml()
