"use strict";
// Answers step by step. The data is described in specdec/evaluation/report/traces.py.
(() => {
  const data = JSON.parse(document.getElementById("answers").textContent);
  const byId = (id) => document.getElementById(id);
  const picks = { question: byId("pick-question"), temperature: byId("pick-temperature"), arm: byId("pick-arm") };
  const STEPS_SHOWN = 40;

  const answers = data.answers.map(([arm, question, turn, temperature, seed, text, steps, trace, difference]) => ({
    arm, question, turn, temperature, seed, steps, difference,
    text: data.texts[text].map((place) => data.strings[place]),
    trace: trace < 0 ? null : data.traces[trace],
  }));
  const questionKey = (one) => `${one.question}/${one.turn}`;
  const settingKey = (one) => `${one.temperature}/${one.seed}`;

  // Elements

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const MARKS = { "\n": "\u21b5", "\r": "\u240d", "\t": "\u21e5", " ": "\u2423" };
  // controls, and characters that would turn the direction of what stands around them
  const UNSEEN = /[\n\r\t ]|[\u0000-\u001f\u007f-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]/u;

  function escaped(character) {
    return MARKS[character] || `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;
  }

  // A token's text with what one cannot see made visible.
  function chip(text) {
    const made = element("span", { class: "chip" });
    if (text === "") made.append(element("span", { class: "mark" }, "(part of a character)"));
    for (const character of text) {
      made.append(UNSEEN.test(character) ? element("span", { class: "mark" }, escaped(character)) : character);
    }
    return made;
  }

  function spoken(text) {
    const named = text.replace(/\n/g, " line break ").replace(/\t/g, " tab ");
    return text === "" ? "part of a character" : `\u201c${named}\u201d`;
  }

  function percent(share) {
    const value = share / 100;
    if (value < 0.01) return "< 0.01 %";
    return `${value < 10 ? value.toFixed(value < 1 ? 2 : 1) : Math.round(value)} %`;
  }

  const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

  // Choosing

  function fill(select, options, wanted) {
    select.replaceChildren(...options.map(([value, label]) => element("option", { value }, label)));
    if (options.some(([value]) => value === wanted)) select.value = wanted;
  }

  function unique(rows, key, label) {
    const found = new Map();
    for (const one of rows) if (!found.has(key(one))) found.set(key(one), label(one));
    return [...found];
  }

  function shortened(text, length) {
    const line = [...text.replace(/\s+/g, " ")];
    return line.length > length ? `${line.slice(0, length - 1).join("")}\u2026` : line.join("");
  }

  function questionLabel(one) {
    const [name, category, turns, opening] = data.questions[one.question];
    const turn = turns > 1 ? `, turn ${one.turn}` : "";
    const traced = answers.some((other) => other.trace && questionKey(other) === questionKey(one));
    return shortened(`${traced ? "\u25b8 " : ""}${name}${turn}${category ? ` (${category})` : ""}: ${opening}`, 90);
  }

  const settingLabel = (one) => {
    const several = answers.some((other) => other.temperature === one.temperature && other.seed !== one.seed);
    return (one.temperature === 0 ? "0, greedy" : String(one.temperature)) + (several ? `, seed ${one.seed}` : "");
  };

  const armLabel = (one) => data.arms[one.arm][0] + (one.trace ? "" : one.steps ? " (no trees)" : " (no steps)");

  function offer(changed) {
    const question = picks.question.value;
    let rows = answers.filter((one) => questionKey(one) === question);
    if (changed !== "arm") {
      fill(picks.temperature, unique(rows, settingKey, settingLabel), picks.temperature.value);
      rows = rows.filter((one) => settingKey(one) === picks.temperature.value);
      fill(picks.arm, unique(rows, (one) => String(one.arm), armLabel), picks.arm.value);
    }
    show(
      answers.find(
        (one) =>
          questionKey(one) === question && settingKey(one) === picks.temperature.value && String(one.arm) === picks.arm.value,
      ),
    );
  }

  // One answer

  function show(answer) {
    byId("opening").textContent = data.questions[answer.question][3];
    const parts = split(answer);
    byId("trace-summary").textContent = summary(answer, parts);
    byId("key").hidden = parts.steps.length === 0;
    byId("steps-title").hidden = parts.steps.length === 0;
    const rows = parts.steps.map((step, place) => stepRow(answer, step, place));
    const text = element("span", { class: "piece own" }, parts.first);
    const isPlain = answer.steps && answer.steps.every((count) => count === 1) && !answer.trace;
    byId("answer").replaceChildren(...(parts.steps.length ? [text, ...parts.steps.map(stepText)] : [answer.text.join("")]));
    const list = byId("steps");
    const shown = isPlain ? [] : rows;
    byId("steps-title").hidden ||= isPlain;
    byId("key").hidden ||= Boolean(isPlain);
    list.replaceChildren(...shown.slice(0, STEPS_SHOWN));
    const more = byId("more-steps");
    more.hidden = shown.length <= STEPS_SHOWN;
    more.textContent = `Show the other ${shown.length - STEPS_SHOWN} steps`;
    more.onclick = () => {
      list.append(...shown.slice(STEPS_SHOWN));
      more.hidden = true;
      (shown[STEPS_SHOWN].querySelector("button") || list).focus();
    };
  }

  // The text by steps: each has the tokens that were drafted and the target's own behind them.
  function split(answer) {
    if (!answer.steps) return { first: "", steps: [] };
    const { trace } = answer;
    const strings = (places) => places.map((place) => data.strings[place]);
    if (trace && trace[0]) {
      const steps = trace[2].map((step) => ({ tokens: strings(step[6]), tree: step }));
      return { first: data.strings[trace[1]], steps };
    }
    let begin = 1;
    const steps = answer.steps.map((count, place) => {
      const tokens = answer.text.slice(begin, begin + count);
      begin += count;
      return { tokens, tree: trace ? trace[2][place] : null };
    });
    return { first: answer.text[0] || "", steps };
  }

  function summary(answer, { steps }) {
    const total = answer.text.length;
    if (!answer.steps) return `${counted(total, "token")}. This arm does not tell its steps.`;
    const emitted = steps.reduce((sum, step) => sum + step.tokens.length, 0);
    const tau = steps.length ? `, tau ${(emitted / steps.length).toFixed(2)}` : "";
    let said = `${counted(total, "token")} in ${counted(steps.length, "step")}${tau}: ${emitted - steps.length} of them were drafted.`;
    if (answer.trace) {
      const drafted = steps.reduce((sum, step) => sum + step.tree[0].length - 1, 0);
      const kept = steps.reduce((sum, step) => sum + step.tree[5].length - 1, 0);
      said += ` ${counted(drafted, "node")} were drafted for that, ${drafted - kept} in vain.`;
      if (answer.trace[0]) said += " What is shown was decoded once more for its trees, and its text differs from the timed one.";
    }
    if (answer.difference >= 0) said += ` From token ${answer.difference + 1} on the text is not that of plain decoding.`;
    return said;
  }

  function stepText(step, place) {
    const run = element("span", { class: step.tree ? "traced" : "", "data-step": place });
    step.tokens.forEach((token, index) => {
      run.append(element("span", { class: `piece ${index < step.tokens.length - 1 ? "accepted" : "own"}` }, token));
    });
    return run;
  }

  // A step in the text is a way to its row for those who point; the rows are there for everybody.
  byId("answer").addEventListener("click", (event) => {
    const run = event.target.closest(".traced");
    if (!run) return;
    const place = Number(run.dataset.step);
    if (place >= STEPS_SHOWN && !byId("more-steps").hidden) byId("more-steps").click();
    const button = byId("steps").children[place].querySelector("button");
    if (button.getAttribute("aria-expanded") === "false") button.click();
    button.focus();
  });

  function stepRow(answer, step, place) {
    const count = step.tokens.length;
    const words = element("span");
    const accepted = step.tokens.slice(0, -1);
    if (accepted.length) {
      words.append(element("span", { class: "unseen" }, "accepted "));
      const kept = chip(accepted.join(""));
      kept.classList.add("piece", "accepted");
      words.append(kept, " ");
    }
    const own = chip(step.tokens[count - 1]);
    own.classList.add("piece", "own");
    words.append(element("span", { class: "unseen" }, "target's own "), own);
    const gain = counted(count, "token") + (step.tree ? `, ${step.tree[0].length - 1} drafted` : "");
    const content = [
      element("span", { class: "number" }, element("span", { class: "unseen" }, "Step "), String(place + 1)),
      words,
      element("span", { class: "gain" }, gain),
    ];
    if (!step.tree) return element("li", {}, element("div", { class: "step" }, ...content));
    const id = `step-${place}`;
    const button = element("button", { type: "button", class: "step", "aria-expanded": "false", "aria-controls": id }, ...content);
    const panel = element("div", { class: "panel", id, hidden: "" });
    button.addEventListener("click", () => {
      const opens = button.getAttribute("aria-expanded") === "false";
      button.setAttribute("aria-expanded", String(opens));
      panel.hidden = !opens;
      if (opens && !panel.hasChildNodes()) panel.append(...stepPanel(answer, step, place));
      const run = byId("answer").querySelector(`[data-step="${place}"]`);
      run.classList.toggle("current", opens);
    });
    return element("li", {}, button, panel);
  }

  // One step's draft tree

  function stepPanel(answer, step, place) {
    const nodes = readNodes(step, answer.temperature > 0);
    const tree = draftTree(nodes, place);
    const all = element("button", { type: "button" }, "Unfold the whole tree");
    all.addEventListener("click", () => {
      for (const item of tree.querySelectorAll("[aria-expanded]")) item.setAttribute("aria-expanded", "true");
    });
    const hidden = tree.querySelector('[aria-expanded="false"]');
    return [element("p", {}, explained(step, nodes)), ...(hidden ? [all] : []), element("div", { class: "treebox" }, tree)];
  }

  // The nodes as objects, with the target's own token as a child of the last accepted one.
  function readNodes(step, isSampled) {
    const [parents, texts, probs, choices, choiceProbs, path, emitted] = step.tree;
    const nodes = parents.map((parent, place) => ({
      text: data.strings[texts[place]],
      prob: probs[place],
      fate: place === 0 ? "root" : path.includes(place) ? "accepted" : "wasted",
      children: [],
      parent,
    }));
    nodes.forEach((node) => {
      if (node.parent >= 0) nodes[node.parent].children.push(node);
    });
    const last = path[path.length - 1];
    const own = data.strings[emitted[emitted.length - 1]];
    const isBest = emitted[emitted.length - 1] === choices[last];
    const twin = nodes[last].children.find((node) => node.text === own);
    const prob = isBest ? choiceProbs[last] : twin ? twin.prob : null;
    const chosen = { text: own, prob, fate: "chosen", children: [], parent: last, isSampled, isProposed: Boolean(twin) };
    chosen.best = isBest ? null : { text: data.strings[choices[last]], prob: choiceProbs[last] };
    nodes[last].hadChildren = nodes[last].children.length > 0;
    nodes[last].children.unshift(chosen);
    return { root: nodes[0], last: nodes[last], chosen, numDrafted: nodes.length - 1, numKept: path.length - 1 };
  }

  function explained(step, { last, chosen, numDrafted, numKept }) {
    if (numDrafted === 0) return `Nothing was drafted; the target chose ${spoken(chosen.text)}.`;
    const wasted = numDrafted - numKept;
    const share = chosen.prob === null ? "" : ` (${percent(chosen.prob)})`;
    const verb = chosen.isSampled ? "drew" : "chose";
    let said = `${counted(numDrafted, "node")} drafted, ${numKept} kept, ${wasted} wasted. `;
    if (!last.hadChildren) said += `A path was kept to its end, and the target added ${spoken(chosen.text)}${share}.`;
    else said += `Behind ${spoken(last.text)} the target ${verb} ${spoken(chosen.text)}${share}${chosen.isProposed ? "" : ", which was not proposed there"}.`;
    if (chosen.best) said += ` Its most probable token was ${spoken(chosen.best.text)} (${percent(chosen.best.prob)}).`;
    return said.replace(/ %/g, "\u00a0%");
  }

  const FATES = { root: "root", accepted: "\u2713 accepted", wasted: "wasted", chosen: "\u2605 target's own" };

  function draftTree({ root }, place) {
    const tree = element("ul", { role: "tree", "aria-label": `Draft tree of step ${place + 1}` });
    tree.append(treeItem(root, 1));
    tree.firstChild.tabIndex = 0;
    tree.addEventListener("keydown", (event) => onKey(event, tree));
    tree.addEventListener("click", (event) => {
      const item = event.target.closest("[role=treeitem]");
      if (!item || !event.target.closest(".node")) return;
      toggle(item);
      focusOn(tree, item);
    });
    return tree;
  }

  function treeItem(node, level) {
    const share = node.prob === null ? "" : percent(node.prob);
    const parts = [spoken(node.text), FATES[node.fate].replace(/^\W+/, "")];
    if (share && node.fate !== "root") parts.push(`target's probability ${share}`);
    if (node.children.length) parts.push(counted(node.children.length, "node") + " behind it");
    const row = element("div", { class: `node ${node.fate}` }, chip(node.text));
    if (share && node.fate !== "root") {
      const prob = element("span", { class: "prob" }, share);
      prob.style.setProperty("--share", `${node.prob / 100}%`);
      row.append(prob);
    }
    const below = countBelow(node);
    const more = node.fate === "wasted" && below ? `, ${below} below` : "";
    row.append(element("span", { class: "fate" }, FATES[node.fate] + more));
    const item = element("li", { role: "treeitem", "aria-level": level, "aria-label": parts.join(", "), tabindex: "-1" }, row);
    if (node.children.length) {
      item.setAttribute("aria-expanded", String(node.fate !== "wasted"));
      item.append(element("ul", { role: "group" }, ...node.children.map((child) => treeItem(child, level + 1))));
    }
    return item;
  }

  function countBelow(node) {
    return node.children.reduce((sum, child) => sum + 1 + countBelow(child), 0);
  }

  function toggle(item) {
    const state = item.getAttribute("aria-expanded");
    if (state !== null) item.setAttribute("aria-expanded", String(state === "false"));
  }

  function focusOn(tree, item) {
    for (const other of tree.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    item.tabIndex = 0;
    item.focus();
  }

  // The keys of a tree: arrows, Home, End, Enter and Space; the asterisk unfolds all siblings.
  function onKey(event, tree) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const item = event.target.closest("[role=treeitem]");
    const visible = [...tree.querySelectorAll("[role=treeitem]")].filter((one) => one.offsetParent !== null);
    const place = visible.indexOf(item);
    const state = item.getAttribute("aria-expanded");
    let next = null;
    if (event.key === "ArrowDown") next = visible[place + 1];
    else if (event.key === "ArrowUp") next = visible[place - 1];
    else if (event.key === "Home") next = visible[0];
    else if (event.key === "End") next = visible[visible.length - 1];
    else if (event.key === "ArrowRight" && state === "true") next = visible[place + 1];
    else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      const opens = event.key === "ArrowRight";
      if (state === String(!opens)) toggle(item);
      else if (!opens) next = item.parentElement.closest("[role=treeitem]");
    } else if (event.key === "Enter" || event.key === " ") toggle(item);
    else if (event.key === "*") {
      for (const one of item.parentElement.children) {
        if (one.hasAttribute("aria-expanded")) one.setAttribute("aria-expanded", "true");
      }
    } else return;
    event.preventDefault();
    if (next) focusOn(tree, next);
  }

  // Begin with an answer that has trees, if there is one.

  const left = data.num_traces - data.traces.length;
  byId("traces-left").hidden = left === 0;
  byId("traces-left").textContent = `The page holds ${data.traces.length} of ${counted(data.num_traces, "trace")}; all are in traces.jsonl.`;

  const order = (one) => one.question * 100 + one.turn;
  const sorted = [...answers].sort((one, other) => order(one) - order(other));
  fill(picks.question, unique(sorted, questionKey, questionLabel), "");
  const gain = (one) => (one.steps && one.steps.length ? one.steps.reduce((sum, n) => sum + n, 0) / one.steps.length : 0);
  const traced = sorted.filter((one) => one.trace);
  const begin = traced.filter((one) => order(one) === order(traced[0])).sort((one, other) => gain(other) - gain(one))[0];
  if (begin) {
    picks.question.value = questionKey(begin);
    const rows = answers.filter((one) => questionKey(one) === questionKey(begin));
    fill(picks.temperature, unique(rows, settingKey, settingLabel), settingKey(begin));
    fill(picks.arm, unique(rows, (one) => String(one.arm), armLabel), String(begin.arm));
  }
  for (const [name, select] of Object.entries(picks)) select.addEventListener("change", () => offer(name));
  if (answers.length) offer("question");
})();
