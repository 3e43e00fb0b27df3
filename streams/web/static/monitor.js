"use strict";
// The only script: it keeps the live part of a page up to date, and takes a token from the address of a sign-in link.

// Make the children of `old` like those of `fresh`, node by node, so that focus, selection and scrolling stay.
function morph(old, fresh) {
  const wanted = Array.from(fresh.childNodes);
  for (let place = 0; place < wanted.length; place++) {
    const next = wanted[place];
    const here = old.childNodes[place];
    if (!here) {
      old.appendChild(next);
    } else if (here.nodeType !== next.nodeType || here.nodeName !== next.nodeName || here.id !== next.id) {
      old.replaceChild(next, here);
    } else if (here.nodeType === Node.ELEMENT_NODE) {
      attributes(here, next);
      morph(here, next);
    } else if (here.nodeValue !== next.nodeValue) {
      here.nodeValue = next.nodeValue;
    }
  }
  while (old.childNodes.length > wanted.length) {
    old.removeChild(old.lastChild);
  }
}

function attributes(here, next) {
  for (const { name } of Array.from(here.attributes)) {
    if (!next.hasAttribute(name)) {
      here.removeAttribute(name);
    }
  }
  for (const { name, value } of Array.from(next.attributes)) {
    if (here.getAttribute(name) !== value) {
      here.setAttribute(name, value);
    }
  }
}

function follow(live, attempt = 0) {
  const connection = document.getElementById("connection");
  const stream = new EventSource(live.dataset.stream);
  const say = (text, isLive) => {
    if (connection.textContent !== text) {
      connection.textContent = text;
      connection.classList.toggle("is-live", isLive);
    }
  };
  stream.onmessage = (message) => {
    attempt = 0;
    // Parsed apart from the page: nothing in it is run or loaded, and the server has escaped what users wrote.
    const parsed = new DOMParser().parseFromString(`<div>${JSON.parse(message.data)}</div>`, "text/html");
    morph(live, parsed.body.firstElementChild);
    say("live", true);
  };
  stream.onopen = () => say("live", true);
  stream.onerror = () => {
    say("not connected: this is the last that was known", false);
    if (stream.readyState === EventSource.CLOSED && attempt < 5) {
      setTimeout(() => follow(live, attempt + 1), 3000); // refused for now, as while the server starts again
    }
  };
  window.addEventListener("pagehide", () => stream.close());
}

function signIn(form) {
  const token = decodeURIComponent(location.hash.slice(1));
  if (token) {
    history.replaceState(null, "", location.pathname); // it stays in no history and no bookmark
    form.elements.token.value = token;
    form.submit();
  }
}

// Choose all letters of a page with one click; those of all pages are chosen by the server.
function choosePage(label) {
  label.hidden = false;
  label.firstChild.addEventListener("change", (event) => {
    for (const box of document.querySelectorAll('input[name="place"]')) {
      box.checked = event.target.checked;
    }
  });
}

const choose = document.getElementById("choose-page");
const live = document.getElementById("live");
const login = document.getElementById("login");
if (live) {
  follow(live);
}
if (choose) {
  choosePage(choose);
}
if (login) {
  signIn(login);
  window.addEventListener("hashchange", () => signIn(login));
}
