// The playground's request as a shell and as Python would send it.

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function asCurl(origin, body) {
  return [`curl -N ${origin}/v1/chat/completions \\`, `  -H "Authorization: Bearer $PILOTLIGHT_API_KEY" \\`, `  -H 'Content-Type: application/json' \\`, `  -d ${quoted(JSON.stringify(body))}`].join("\n");
}

// JSON's own words, as Python's: null, true and false, but not within strings.
function literal(value) {
  return JSON.stringify(value, null, 4).replace(/"(?:[^"\\]|\\.)*"|\btrue\b|\bfalse\b|\bnull\b/g, (word) => ({ true: "True", false: "False", null: "None" })[word] ?? word);
}

export function asPython(origin, body) {
  return `import os

from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=os.environ["PILOTLIGHT_API_KEY"])
stream = client.chat.completions.create(
    model=${literal(body.model)},
    messages=${literal(body.messages)},
    temperature=${body.temperature},
    max_tokens=${body.max_tokens},
    stream=True,
)
for event in stream:
    if event.choices:
        print(event.choices[0].delta.content or "", end="", flush=True)
`;
}
