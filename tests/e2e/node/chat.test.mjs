// Chats: whole, streamed, with tools, with a schema.
import assert from "node:assert/strict";
import { test } from "node:test";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { makeClient, model, question } from "./client.mjs";

const client = makeClient();
const plain = { model, messages: question, max_tokens: 10, temperature: 0 };
const forced = { parallel_tool_calls: false, max_tokens: 48 };
const weather = {
  type: "function",
  function: {
    name: "weather",
    description: "The weather in a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

test("a whole answer", async () => {
  const answer = await client.chat.completions.create(plain);
  assert.match(answer.choices[0].message.content, /Paris/);
  assert.equal(answer.object, "chat.completion");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("a stream is the same in pieces", async () => {
  const whole = await client.chat.completions.create(plain);
  const stream = await client.chat.completions.create({ ...plain, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage = null;
  let pieces = 0;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
    pieces += 1;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  assert.ok(pieces > 3);
});

test("the helper of streams puts it together", async () => {
  const stream = client.chat.completions.stream({ ...plain, stream_options: { include_usage: true } });
  let heard = "";
  stream.on("content", (delta) => (heard += delta));
  const answer = await stream.finalChatCompletion();
  assert.equal(answer.choices[0].message.content, heard);
  assert.match(heard, /Paris/);
  assert.equal((await stream.totalUsage()).completion_tokens, answer.usage.completion_tokens);
});

test("a stream can be left", async () => {
  const stream = await client.chat.completions.create({ ...plain, max_tokens: 200, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
  const answer = await client.chat.completions.create(plain);
  assert.match(answer.choices[0].message.content, /Paris/);
});

test("a tool that must be called is called, and its result goes back", async () => {
  for (const stream of [false, true]) {
    const calls = [];
    const look = {
      type: "function",
      function: {
        ...weather.function,
        parse: JSON.parse,
        function: ({ city }) => {
          calls.push(city);
          return `It is sunny in ${city}.`;
        },
      },
    };
    const runner = client.chat.completions.runTools(
      {
        model,
        messages: [{ role: "user", content: "How is the weather in Rome?" }],
        tools: [look],
        tool_choice: "required",
        temperature: 0,
        ...forced,
        stream,
      },
      { maxChatCompletions: 2 },
    );
    await runner.done();
    assert.equal(calls.length, 2, "one call each turn");
    assert.ok(calls.every((city) => ["Rome", "Oslo"].includes(city)));
    const roles = runner.messages.map((message) => message.role);
    assert.deepEqual(roles.slice(0, 3), ["user", "assistant", "tool"]);
    assert.match(runner.messages[2].content, /^It is sunny in /);
  }
});

test("a tool that is named is called once", async () => {
  const answer = await client.chat.completions.create({
    ...plain,
    tools: [weather],
    tool_choice: { type: "function", function: { name: "weather" } },
    ...forced,
  });
  const [choice] = answer.choices;
  assert.equal(choice.finish_reason, "tool_calls");
  assert.equal(choice.message.tool_calls.length, 1);
  assert.equal(choice.message.tool_calls[0].function.name, "weather");
  assert.ok(["Rome", "Oslo"].includes(JSON.parse(choice.message.tool_calls[0].function.arguments).city));
});

test("the helper of streams puts calls together", async () => {
  const stream = client.chat.completions.stream({ ...plain, tools: [weather], tool_choice: "required", ...forced });
  const answer = await stream.finalChatCompletion();
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(call.function.name, "weather");
  assert.ok(["Rome", "Oslo"].includes(JSON.parse(call.function.arguments).city));
});

test("an answer keeps to a schema of zod", async () => {
  const City = z.object({ name: z.enum(["Paris", "London"]), letters: z.number().int().min(1).max(20) });
  const answer = await client.chat.completions.parse({ ...plain, max_tokens: 48, response_format: zodResponseFormat(City, "city") });
  const parsed = answer.choices[0].message.parsed;
  assert.ok(["Paris", "London"].includes(parsed.name));
  assert.ok(Number.isInteger(parsed.letters));
});
