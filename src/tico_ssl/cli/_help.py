"""Help texts: the words of a verb as its metavars write them, and the verbs in the order in which one meets them."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

ORDER = (
    *("pretrain", "evaluate", "report", "compare", "finetune", "predict", "embed", "search", "curate", "export"),
    *("data", "study", "list", "describe", "doctor", "bench", "plan", "cache", "replay"),
)


class Whole:
    """A verb whose line in a list of verbs is its first sentence, wrapped instead of cut."""

    help: str | None

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence."""
        return " ".join((self.help or "").split()).partition(". ")[0].removesuffix(".") + "."


class Verbs(TyperGroup):
    """All verbs."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, those that a first run needs before others."""
        return sorted(super().list_commands(ctx), key=ORDER.index)


class Verb(Whole, TyperCommand):
    """A verb. Typer itself writes types and further brackets around the metavars of arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An option that there is not may be meant as a setting."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = getattr(error, "option_name", None)  # of a NoSuchOption, which typer has from click or of its own
            takes_settings = any("KEY=VALUE ..." in words for words, _ in self._arguments(ctx))
            if name is not None and takes_settings and not getattr(error, "possibilities", None):
                error.message += f"; settings have no dashes: {name.lstrip('-').replace('-', '_')}=VALUE"  # type: ignore[attr-defined]
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the verb."""
        return [*(words for words, _ in self._arguments(ctx)), "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments and options, each with what it is."""
        options = [one.get_help_record(ctx) for one in self.get_params(ctx) if one.param_type_name == "option"]
        for title, rows in (("Arguments", self._arguments(ctx)), ("Options", [row for row in options if row])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _arguments(self, ctx: Any) -> list[tuple[str, str]]:
        given: list[Any] = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return [(one.metavar or one.name.upper(), one.help or "") for one in given]
