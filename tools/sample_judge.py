"""A rule instead of an LLM: an OpenAI-compatible endpoint that grades by common words.

`python -m tools.sample_judge COMMAND...` runs an evaluation with it as its judge, so that the way
through questions, answers, verdicts and pages is walked offline. Its grades say nothing about how
good an answer is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "words_in_common"
PART = re.compile(r"<<(?P<name>[^<>]+) (?P<code>\w{8})>>\n(?P<text>.*?)\n<<end (?P=code)>>", re.S)
LAST_TURN = re.compile(
    r".*\[question \d+\]\n(?P<question>.*?)\n\[answer \d+\]\n(?P<answer>.*)", re.S
)


def judge(text: str) -> str:
    """Return the verdict for a request, in the requested form."""
    parts = {part["name"]: LAST_TURN.match(part["text"]) for part in PART.finditer(text)}
    reference = parts.pop("reference", None)
    grades = []
    for part in parts.values():
        if part is None:
            return "There is no answer to judge."
        wanted = _words(reference["answer"] if reference else part["question"])
        common = wanted & _words(part["answer"])
        grades.append(1 + round(9 * len(common) / max(1, len(wanted))))
    if len(grades) == 1:
        return f"Words in common by a rule, not by a model.\nVerdict: {grades[0]}"
    one, other = grades
    return f"{one} against {other}.\nVerdict: {'tie' if one == other else 1 + (other > one)}"


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


class Handler(BaseHTTPRequestHandler):
    """Answer chat completions."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = judge(asked["messages"][-1]["content"])
        words = sum(len(message["content"].split()) for message in asked["messages"])
        answer = {
            "choices": [{"message": {"role": "assistant", "content": said}}],
            "usage": {"prompt_tokens": words, "completion_tokens": len(said.split())},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler] = Handler) -> Iterator[str]:
    """Serve on a free local port; yield the endpoint's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    # The server notices a shutdown when it polls, by default every half second.
    polls = {"poll_interval": 0.01}
    threading.Thread(target=server.serve_forever, kwargs=polls, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    print(f"no JUDGE_URL: graded by a rule ({MODEL}), which shows the way and measures nothing")
    with serving() as url:
        words = [f"evaluation.judge.url={url}", f"evaluation.judge.model={MODEL}"]
        sys.exit(subprocess.call([*sys.argv[1:], *words]))
