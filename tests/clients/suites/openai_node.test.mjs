// What OpenAI's client for Node does.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.PILOTLIGHT_URL}/v1`, apiKey: process.env.PILOTLIGHT_API_KEY, maxRetries: 0 });
const model = "ember-7m";
const messages = [{ role: "user", content: "What is a pilot light?" }];
const asked = { model, messages, max_tokens: 40, temperature: 0 };

test("a chat", async () => {
  const answer = await client.chat.completions.create(asked);
  assert.match(answer.choices[0].message.content, /pilot light/i);
});

test("a stream is the answer in pieces", async () => {
  const whole = await client.chat.completions.create(asked);
  let told = "";
  const stream = await client.chat.completions.create({ ...asked, stream: true });
  for await (const chunk of stream) told += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(told, whole.choices[0].message.content);
});

test("the client's own reading of a stream", async () => {
  const runner = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  const final = await runner.finalChatCompletion();
  assert.ok(final.choices[0].message.content.length > 0);
  assert.ok((await runner.totalUsage()).total_tokens > 0);
});

test("a response, and one that goes on from it", async () => {
  const first = await client.responses.create({ model, input: "What is a pilot light?", max_output_tokens: 40 });
  assert.ok(first.output_text.length > 0);
  const next = await client.responses.create({ model, input: "And then?", previous_response_id: first.id, max_output_tokens: 20 });
  assert.equal(next.previous_response_id, first.id);
  await client.responses.delete(first.id);
  await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
});

test("events of a response's stream", async () => {
  const kinds = [];
  for await (const event of await client.responses.create({ model, input: "Why?", max_output_tokens: 8, stream: true })) kinds.push(event.type);
  assert.equal(kinds[0], "response.created");
  assert.ok(["response.completed", "response.incomplete"].includes(kinds.at(-1)));
});

test("a stream that is left", async () => {
  const stream = await client.chat.completions.create({ ...asked, max_tokens: 500, ignore_eos: true, stream: true });
  for await (const _ of stream) { stream.controller.abort(); break; }
  assert.equal((await client.chat.completions.create({ ...asked, max_tokens: 1 })).object, "chat.completion");
});

test("models", async () => {
  const names = [];
  for await (const one of client.models.list()) names.push(one.id);
  assert.ok(names.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("errors are the client's own", async () => {
  await assert.rejects(client.chat.completions.create({ ...asked, model: "none" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...asked, max_tokens: -1 }), OpenAI.BadRequestError);
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
});
