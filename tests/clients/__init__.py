'''Real clients, pinned, drive a real server. `make test-clients` runs it all and prints a table of clients at its end.

    client -> recorder -> penstock serve (front end, worker with the HTTP backend) -> scripted engine

Everything is on loopback. The model is a small tokenizer with a chat template in Hermes' format (`chat_model.make_tokenizer`). A test is
short:

    from clients.conftest import Play
    from clients.setup import RECIPES, set_up
    from clients.upstream import InTurn, tool_call

    def test_a_tool(play: Play) -> None:
        script = InTurn(tool_call("bash", command="echo hello"), "It said hello.")
        scene = play("Codex", RECIPES["codex"].version("@openai/codex"), script)
        (scene.home / ".codex").mkdir()
        (scene.home / ".codex" / "config.toml").write_text(f"""... base_url = "{scene.url}/v1" ... model = "{scene.model}" """)
        done = scene.run(set_up("codex"), "exec", "say hello", seconds=60)
        assert "It said hello." in done.stdout
        assert "hello" in scene.prompts[1].text                  # what the model saw
        turns = scene.turns()
        assert len(turns) == 1 and turns[0].share > 0.97, list(map(str, turns))

**Environments** (`setup.py`): `set_up(name)` returns a program (`codex`, `claude`, `opencode`) or the python of an environment
(`litellm`, `libraries`); it makes what is missing, in `~/.cache/penstock/clients`, keyed by the lock. Locks are
`npm/NAME/package-lock.json` and `requirements/client-NAME.lock`. OpenAI's and Anthropic's own libraries are in the development
environment: `sys.executable`. Programs in Python that a test runs are in `programs/`. For a new version of a program, change its
`package.json` and run `npm install --package-lock-only --ignore-scripts --omit-lockfile-registry-resolved` beside it. `make lock` is for
libraries.

**`play(client, version, script, *flags_of_penstock_serve, template="", context_length=200_000, model="test-model")`** begins a `Scene`.
Servers are started once per set of options and shared by tests, so use few sets. `template` replaces the chat template.

**A script** is a function from a `Prompt` (`text`, `token_ids`, `body`) to the text that the model writes, tool calls in the model's own
format (`tool_call(name, **arguments)`). It may look at the prompt and decide (a subagent, a title, a summary), it may block, it may
raise `Refused(status, message)`. `InTurn("…", function, "…")` answers in turn and fails the test if there are more requests than answers.
A script that raises anything else fails the test.

**A scene** has `url`, `model`, `home`, `work`, `environment(**more)` and `run(command, …, seconds=, stdin=, **environment)`. The
environment has an empty home, a made-up key, telemetry and updates off, and a proxy that refuses and counts whatever goes to another
machine (`scene.outside.asked`). Recorded are `scene.exchanges` (method, path, headers, body, `json`, status, `answer`, `answer_json`,
`events`, `answer_headers`; `scene.posts(path)` are some of them) and `scene.prompts` (what the engine got and answered).

**Errors**: at the end of the test every answer of 4xx or 5xx, and every error in an event of a stream (status 200), must have been
announced with `scene.expect(status=, path=, text=)`, and what was announced must have happened. Other machines must not have been asked
for anything that is not in `scene.may_ask`.

**Prefixes** (`prefixes.py`): `scene.turns()` compares each prompt with the turn before it in the same conversation: `reusable` tokens,
`shared` tokens, `share`. Conversations are told apart by what they share; for agents with similar prompts pass
`conversation=lambda prompt: …`. Assert the number of turns, too. The table shows the turns of the last call of `scene.turns`.

Tests run with `pytest --clients tests/clients` once the environments are there; without `--clients` they are not collected. Keep each
test within seconds: all of them must take less than four minutes on two cores.
'''
