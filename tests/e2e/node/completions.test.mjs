// Completions, and the models that there are.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makeClient, model } from "./client.mjs";

const client = makeClient();
const plain = { model, prompt: "Once upon a time", max_tokens: 12, temperature: 0 };

test("a whole completion, and a stream of the same", async () => {
  const whole = await client.completions.create(plain);
  assert.ok(whole.choices[0].text.length > 10);
  assert.equal(whole.usage.completion_tokens, 12);
  let text = "";
  for await (const chunk of await client.completions.create({ ...plain, stream: true })) {
    text += chunk.choices[0].text;
  }
  assert.equal(text, whole.choices[0].text);
});

test("several prompts, several choices", async () => {
  const answer = await client.completions.create({ ...plain, prompt: ["One", "Two"], n: 2, max_tokens: 3, logprobs: 1 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
  assert.ok(answer.choices.every((choice) => choice.logprobs.tokens.length === 3));
});

test("models are listed, and told of one by one", async () => {
  const names = [];
  for await (const one of client.models.list()) {
    names.push(one.id);
  }
  assert.deepEqual(names, [model]);
  const one = await client.models.retrieve(model);
  assert.equal(one.id, model);
  assert.equal(one.object, "model");
});
