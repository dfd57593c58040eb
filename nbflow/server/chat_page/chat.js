// The chat page: a conversation with a model over the server's OpenAI endpoints.
import { show } from "/page/markup.js";

const at = (id) => document.getElementById(id);
const KEPT = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "mode"];
let messages = []; // {role, content}: what the model is sent
let running = null; // AbortController of the answer that is being written

function headers() {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function loadModels() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) {
    at("settings").hidden = false;
    at("rate").textContent = await problem(response);
    return;
  }
  const { data } = await response.json();
  at("model").replaceChildren(...data.map((model) => new Option(model.id, model.id)));
  at("rate").textContent = "";
}

// ---- request ---------------------------------------------------------------------------------

function parameters() {
  const body = { model: at("model").value, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (at(name).value !== "") body[name] = Number(at(name).value);
  }
  if (at("stop").value) body.stop = at("stop").value;
  return body;
}

function question() {
  if (at("mode").value === "text") {
    const prompt = messages.map((message) => message.content).join("");
    return ["/v1/completions", { max_tokens: 256, ...parameters(), prompt }];
  }
  const system = at("system").value.trim();
  const all = system ? [{ role: "system", content: system }, ...messages] : messages;
  return ["/v1/chat/completions", { ...parameters(), messages: all }];
}

// ---- response --------------------------------------------------------------------------------

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const line = buffer.slice(0, end);
      buffer = buffer.slice(end + 2);
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

async function answer() {
  const message = { role: "assistant", content: "" };
  const article = addArticle(message);
  const body = article.querySelector(".body");
  const [path, request] = question();
  running = new AbortController();
  busy(true);
  const started = performance.now();
  let first = 0;
  let drawn = false;
  const draw = () => {
    drawn = false;
    const below = follows();
    show(body, message.content);
    if (below) scrollDown();
  };
  try {
    const response = await fetch(path, {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(request),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await problem(response));
    let reason = null;
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      const text = choice && (choice.delta ? choice.delta.content : choice.text);
      if (text) {
        first ||= performance.now();
        message.content += text;
        if (!drawn) {
          drawn = true;
          requestAnimationFrame(draw); // once for each picture, however fast the tokens come
        }
      }
      reason = (choice && choice.finish_reason) || reason;
      if (chunk.usage) tell(chunk.usage, started, first);
    }
    if (reason === "length") addNote(article, "ended at the token limit");
  } catch (error) {
    if (error.name === "AbortError") {
      addNote(article, "stopped");
    } else {
      article.classList.add("failed");
      message.content += `${message.content && "\n\n"}${error.message}`;
      message.failed = true;
    }
  } finally {
    running = null;
    draw();
    busy(false);
    settle(message);
    at("input").focus();
  }
}

function settle(message) {
  if (!message.failed && (message.content || at("mode").value === "text")) {
    messages.push(message);
    return;
  }
  const { content } = messages.pop(); // the question, so that it can be sent again
  if (message.failed && !at("input").value) {
    at("input").value = content;
    grow();
  }
}

function tell(usage, started, first) {
  const now = performance.now();
  const n = usage.completion_tokens;
  const rate = first && n > 1 ? ((n - 1) / (now - first)) * 1000 : 0;
  const cached = usage.prompt_tokens_details && usage.prompt_tokens_details.cached_tokens;
  at("rate").textContent = [
    `${usage.prompt_tokens} + ${n} tokens`,
    cached ? `${cached} from the cache` : "",
    first ? `first after ${Math.round(first - started)} ms` : "",
    rate ? `${rate >= 100 ? Math.round(rate) : rate.toFixed(1)} tokens/s` : "",
  ].filter(Boolean).join(" · ");
}

// ---- rendering -------------------------------------------------------------------------------

function addArticle(message) {
  at("empty").hidden = true;
  const article = document.createElement("article");
  article.className = message.role;
  article.setAttribute("aria-label", message.role === "user" ? "You" : "Model");
  const body = document.createElement("div");
  body.className = "body";
  if (message.role === "user") body.textContent = message.content;
  const tools = document.createElement("div");
  tools.className = "tools";
  if (message.role !== "user") {
    const copy = document.createElement("button");
    copy.type = "button";
    copy.textContent = "Copy";
    copy.onclick = () => navigator.clipboard.writeText(message.content);
    tools.append(copy);
  }
  article.append(body, tools);
  at("messages").append(article);
  scrollDown();
  return article;
}

function addNote(article, text) {
  const note = document.createElement("span");
  note.textContent = text;
  article.querySelector(".tools").append(note);
}

function follows() {
  const main = at("messages");
  return main.scrollHeight - main.scrollTop - main.clientHeight < 60;
}

function scrollDown() {
  at("messages").scrollTop = at("messages").scrollHeight;
}

function busy(yes) {
  at("send").hidden = yes;
  at("stop-button").hidden = !yes;
  at("messages").setAttribute("aria-busy", String(yes));
}

function grow() {
  const input = at("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

// ---- user input ------------------------------------------------------------------------------

function send(event) {
  event.preventDefault();
  const text = at("input").value;
  if (running || !text.trim()) return;
  at("input").value = "";
  grow();
  messages.push({ role: "user", content: text });
  addArticle(messages.at(-1));
  answer();
}

function stop() {
  if (running) running.abort();
}

function begin() {
  stop();
  messages = [];
  for (const article of document.querySelectorAll("article")) article.remove();
  at("empty").hidden = false;
  at("rate").textContent = "";
  at("input").focus();
}

at("composer").addEventListener("submit", send);
at("stop-button").addEventListener("click", stop);
at("new").addEventListener("click", begin);
at("input").addEventListener("input", grow);
at("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    begin();
  }
});
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("settings-button").addEventListener("click", () => {
  at("settings").hidden = !at("settings").hidden;
  at("settings-button").setAttribute("aria-expanded", String(!at("settings").hidden));
});
at("key").addEventListener("change", loadModels); // the key is kept in this page alone
for (const name of KEPT) {
  at(name).value = localStorage.getItem(`nbflow.${name}`) ?? at(name).value;
  at(name).addEventListener("change", () => localStorage.setItem(`nbflow.${name}`, at(name).value));
}
loadModels();
