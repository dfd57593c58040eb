// Render a model's text as DOM elements, from text nodes only: its output cannot run scripts.

export function show(target, text) {
  const fresh = document.createDocumentFragment();
  const parts = text.split(/^```([^\n`]*)$/m); // text, language, code, "", text, ...
  let fenced = false;
  for (let i = 0; i < parts.length; i += 2) {
    const body = parts[i].replace(/^\n/, "");
    if (fenced) {
      const pre = document.createElement("pre");
      const code = document.createElement("code");
      code.textContent = body.replace(/\n$/, "");
      pre.append(code);
      fresh.append(pre);
    } else {
      lines(fresh, i === 0 ? parts[0] : body);
    }
    fenced = !fenced;
  }
  target.replaceChildren(fresh);
}

function lines(target, text) {
  const rows = text.split("\n");
  rows.forEach((row, i) => {
    const heading = /^#{1,4} +(.*)$/.exec(row);
    if (heading) {
      const element = document.createElement("h2");
      inline(element, heading[1]);
      target.append(element);
    } else {
      inline(target, row);
      if (i < rows.length - 1) target.append("\n");
    }
  });
}

function inline(target, text) {
  for (const part of text.split(/(`[^`]+`|\*\*[^*]+\*\*)/)) {
    if (part.startsWith("`") && part.length > 2) {
      target.append(element("code", part.slice(1, -1)));
    } else if (part.startsWith("**") && part.length > 4) {
      target.append(element("strong", part.slice(2, -2)));
    } else if (part) {
      target.append(part);
    }
  }
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
