// A button on each block of code that copies its text; of a console session, only what is typed.
document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return; // pages opened without https or localhost: no button that does nothing
  for (const block of document.querySelectorAll("div.highlight > pre")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const lines = block.textContent.trimEnd().split("\n");
      const typed = lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2));
      await navigator.clipboard.writeText((typed.length ? typed : lines).join("\n") + "\n");
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.parentElement.append(button);
  }
});
