// What is wrong is of the class that the client has for it. One of the keys may ask once a minute.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { makeClient, model, question } from "./client.mjs";

const client = makeClient();
const plain = { model, messages: question, max_tokens: 1 };

test("a wrong field is a bad request, which names it", async () => {
  await assert.rejects(client.chat.completions.create({ ...plain, temperature: 9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.status, 400);
    assert.equal(error.param, "temperature");
    assert.match(error.message, /temperature/);
    return true;
  });
});

test("in a stream, too", async () => {
  await assert.rejects(client.chat.completions.create({ ...plain, n: 0, stream: true }), OpenAI.BadRequestError);
});

test("a model that is not there is not found", async () => {
  // Asked one after the other: a rejection that nobody awaits yet would end the test.
  for (const ask of [() => client.chat.completions.create({ ...plain, model: "a/b" }), () => client.models.retrieve("a/b")]) {
    await assert.rejects(ask(), (error) => {
      assert.ok(error instanceof OpenAI.NotFoundError);
      assert.equal(error.code, "model_not_found");
      return true;
    });
  }
});

test("a key that is not known does not come in", async () => {
  await assert.rejects(makeClient({ apiKey: "wrong" }).models.list(), (error) => {
    assert.ok(error instanceof OpenAI.AuthenticationError);
    assert.equal(error.status, 401);
    assert.equal(error.code, "invalid_api_key");
    return true;
  });
});

test("a key that asks too often is told when to ask again", async () => {
  const hasty = makeClient({ apiKey: process.env.PENSTOCK_HASTY_KEY });
  await hasty.chat.completions.create(plain);
  await assert.rejects(hasty.chat.completions.create(plain), (error) => {
    assert.ok(error instanceof OpenAI.RateLimitError);
    assert.equal(error.status, 429);
    assert.ok(Number(error.headers.get("retry-after")) >= 1);
    return true;
  });
  await client.chat.completions.create(plain);
});

test("nobody listens", async () => {
  const lost = makeClient({ baseURL: "http://127.0.0.1:9/v1" });
  await assert.rejects(lost.models.list(), OpenAI.APIConnectionError);
});
