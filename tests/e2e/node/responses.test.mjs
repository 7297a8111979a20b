// Responses: made, streamed, kept, continued, cancelled, forgotten; and conversations.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { makeClient, model, question } from "./client.mjs";

const client = makeClient();
const plain = { model, input: question[0].content, max_output_tokens: 12, temperature: 0 };

test("a response is made, kept, got again and forgotten", async () => {
  const made = await client.responses.create(plain);
  assert.match(made.output_text, /Paris/);
  assert.ok(["completed", "incomplete"].includes(made.status));
  assert.equal(made.usage.total_tokens, made.usage.input_tokens + made.usage.output_tokens);
  const kept = await client.responses.retrieve(made.id);
  assert.deepEqual(kept.output, made.output);
  const items = [];
  for await (const item of client.responses.inputItems.list(made.id)) {
    items.push(item);
  }
  assert.equal(items.length, 1);
  await client.responses.delete(made.id);
  await assert.rejects(client.responses.retrieve(made.id), OpenAI.NotFoundError);
});

test("a stream is the same in typed events", async () => {
  const whole = await client.responses.create(plain);
  const stream = client.responses.stream(plain);
  let text = "";
  const numbers = [];
  stream.on("event", (event) => numbers.push(event.sequence_number));
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const final = await stream.finalResponse();
  assert.equal(text, whole.output_text);
  assert.equal(final.output_text, text);
  assert.deepEqual(numbers, numbers.map((_, index) => index));
});

test("a response goes on where another ended", async () => {
  const first = await client.responses.create(plain);
  const second = await client.responses.create({ ...plain, input: "And of Italy?", previous_response_id: first.id });
  assert.equal(second.previous_response_id, first.id);
  assert.ok(second.usage.input_tokens > first.usage.total_tokens);
});

test("what runs in the background can be stopped, or waited for", async () => {
  const long = await client.responses.create({ ...plain, max_output_tokens: 2000, background: true, min_tokens: 1900 });
  assert.ok(["queued", "in_progress"].includes(long.status));
  const stopped = await client.responses.cancel(long.id);
  assert.equal(stopped.status, "cancelled");
  let short = await client.responses.create({ ...plain, max_output_tokens: 2, background: true });
  while (["queued", "in_progress"].includes(short.status)) {
    await new Promise((resolve) => setTimeout(resolve, 20));
    short = await client.responses.retrieve(short.id);
  }
  assert.equal(short.usage.output_tokens, 2);
});

test("a call keeps to the schema of its tool, and its output goes back", async () => {
  const parameters = { type: "object", properties: { city: { type: "string", enum: ["Rome", "Oslo"] } }, required: ["city"], additionalProperties: false };
  const tools = [{ type: "function", name: "weather", description: "The weather in a city", parameters, strict: true }];
  const asked = { ...plain, max_output_tokens: 48, tools, parallel_tool_calls: false };
  const called = await client.responses.create({ ...asked, tool_choice: "required" });
  const call = called.output.find((item) => item.type === "function_call");
  assert.ok(["Rome", "Oslo"].includes(JSON.parse(call.arguments).city));
  const output = [{ type: "function_call_output", call_id: call.call_id, output: "It is sunny." }];
  const answer = await client.responses.create({ ...asked, input: output, previous_response_id: called.id, tool_choice: "none", max_output_tokens: 4 });
  assert.equal(answer.output.filter((item) => item.type === "function_call").length, 0);
});

test("an answer keeps to a schema", async () => {
  const schema = { type: "object", properties: { name: { type: "string", enum: ["Paris", "London"] } }, required: ["name"], additionalProperties: false };
  const format = { type: "json_schema", name: "city", schema, strict: true };
  const answer = await client.responses.parse({ ...plain, max_output_tokens: 32, text: { format } });
  assert.ok(["Paris", "London"].includes(JSON.parse(answer.output_text).name));
});

test("a conversation remembers", async () => {
  const conversation = await client.conversations.create({ metadata: { topic: "cities" } });
  const first = await client.responses.create({ ...plain, max_output_tokens: 4, conversation: conversation.id });
  const second = await client.responses.create({ ...plain, max_output_tokens: 4, conversation: conversation.id });
  assert.ok(second.usage.input_tokens > first.usage.total_tokens);
  const items = [];
  for await (const item of client.conversations.items.list(conversation.id, { order: "asc" })) {
    items.push(item.role);
  }
  assert.deepEqual(items, ["user", "assistant", "user", "assistant"]);
  await client.conversations.delete(conversation.id);
  await assert.rejects(client.conversations.retrieve(conversation.id), OpenAI.NotFoundError);
});

test("what is wrong is a bad request, which names it", async () => {
  await assert.rejects(client.responses.create({ ...plain, max_output_tokens: 0 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "max_output_tokens");
    return true;
  });
});
