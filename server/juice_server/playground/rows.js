// The prompts of a file: one a line, JSON lines, a list in JSON, or columns.

export async function rowsOf(file) {
  const text = await file.text();
  if (/\.[ct]sv$/i.test(file.name)) return fromColumns(text);
  return /\.jsonl?$/i.test(file.name) ? fromJson(text) : fromText(text);
}

function fromText(text) {
  const lines = lined(text);
  return lines.every((line) => line.startsWith("{")) ? fromJson(text) : lines.map((prompt) => ({ prompt }));
}

const lined = (text) => text.split(/\r?\n/).filter((line) => line.trim());

function fromJson(text) {
  if (text.trimStart().startsWith("[")) return JSON.parse(text).map(row);
  return lined(text).map((line, i) => {
    let found;
    try {
      found = JSON.parse(line);
    } catch (error) {
      throw new Error(`line ${i + 1} is not JSON: ${error.message}`);
    }
    return row(found, i);
  });
}

function row(found, i) {
  const { prompt, context } = found ?? {};
  if (typeof prompt !== "string") throw new Error(`row ${i + 1} has no prompt that is text`);
  return { prompt, context: typeof context === "string" ? context : "" };
}

// Separated values as RFC 4180 has them: quotes hold separators, line ends and doubled quotes.
// The separator is that which the first line has most of.
function fromColumns(text) {
  const first = text.split("\n", 1)[0];
  const separator = [",", ";", "\t"].reduce((best, own) => (first.split(own).length > first.split(best).length ? own : best));
  const [head, ...body] = cells(text, separator).filter((own) => own.length > 1 || own[0] !== "");
  const names = (head ?? []).map((name) => name.trim().toLowerCase());
  if (!names.includes("prompt")) throw new Error(`the columns are ${names.join(", ") || "none"}; expected prompt, and perhaps context`);
  return body.map((own, i) => row(Object.fromEntries(names.map((name, k) => [name, own[k]])), i));
}

function cells(text, separator) {
  const found = [[""]];
  let quoted = false;
  for (let i = 0; i < text.length; i += 1) {
    const sign = text[i];
    const own = found.at(-1);
    if (quoted) {
      if (sign === '"' && text[i + 1] === '"') own[own.length - 1] += text[++i];
      else if (sign === '"') quoted = false;
      else own[own.length - 1] += sign;
    } else if (sign === '"') quoted = true;
    else if (sign === separator) own.push("");
    else if (sign === "\n") found.push([""]);
    else if (sign !== "\r") own[own.length - 1] += sign;
  }
  return found;
}
