"""Valid and invalid requests made from the API's document. Answers are checked against it."""

from __future__ import annotations

import random
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi import checks

from fuzzing.target import Findings, Target

NEEDED = ("model", "messages", "input", "prompt", "tokens", "items", "metadata", "max_tokens")
CHECKS = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]


def run_schemathesis(target: Target, cases: int, seed: int, findings: Findings) -> None:
    """Each operation gets a share of the cases, a larger one if it has a body. Shares that are not used up go to the others."""
    schema: Any = schemathesis.openapi.from_dict(target.document)
    operations = [result.ok() for result in schema.get_all_operations()]
    plain = [operation for operation in operations if not operation.definition.raw.get("requestBody")]
    with_body = [operation for operation in operations if operation not in plain]
    for operation in plain:
        _fuzz(target, operation, max(4, cases // 200), seed, findings)
    rest = cases - findings.cases
    for number, operation in enumerate(with_body):
        share = -(-rest // len(with_body))
        # In parts, because hypothesis slows down with the number of examples.
        for start in range(0, share, 1000):
            _fuzz(target, operation, min(1000, share - start), seed + 1000 * number + start, findings)


def _fuzz(target: Target, operation: Any, examples: int, seed: int, findings: Findings) -> None:
    session = requests.Session()

    def call(case: Any, number: int) -> None:
        _aim(case, target, number)
        try:
            response = case.call(base_url=target.server.url, session=session, timeout=target.pace.seconds)
        except requests.RequestException as error:
            findings.count(operation.label, "none")
            findings.report("no answer", f"{error!r} to {case.as_curl_command()}")
            return
        findings.count(operation.label, str(response.status_code))
        if response.status_code >= 500:
            findings.report("5xx", f"{response.status_code} {response.text[:300]} to {case.as_curl_command()}")
        _check_against_document(case, response, findings)

    for mode in schemathesis.GenerationMode:
        quick = settings(
            max_examples=-(-examples // 2), database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
        )
        run = hypothesis.seed(seed)(quick(given(case=operation.as_strategy(generation_mode=mode), number=st.integers(0, 2**32))(call)))
        try:
            run()
        except hypothesis.errors.Unsatisfiable:
            # Such a request cannot be wrong.
            continue


def _aim(case: Any, target: Target, number: int) -> None:
    """Most cases name an existing model and conversation, and ask for little text. Many have few fields, so that errors differ."""
    drawn = random.Random(number)
    if isinstance(case.body, dict) and drawn.random() < 0.9:
        if drawn.random() < 0.6:
            kept = {*drawn.sample(sorted(case.body), min(len(case.body), 3)), *NEEDED}
            case.body = {name: value for name, value in case.body.items() if name in kept}
        if "model" in case.body:
            case.body["model"] = target.model
        for name, most in (("max_tokens", 16), ("max_completion_tokens", 16), ("max_output_tokens", 16), ("n", 4), ("best_of", 4)):
            if type(case.body.get(name)) is int:
                case.body[name] = min(case.body[name], most)
    if "id" in (case.path_parameters or {}) and drawn.random() < 0.5:
        case.path_parameters["id"] = target.known_id(case.path, case.method)


def _check_against_document(case: Any, response: Any, findings: Findings) -> None:
    try:
        case.validate_response(response, checks=CHECKS)
    except (Failure, FailureGroup) as error:
        text = "; ".join(str(one) for one in getattr(error, "exceptions", [error]))
        findings.report("an answer that contradicts the document", f"{text} {case.as_curl_command()}")
