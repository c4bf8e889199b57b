// Pages opened as files may not start workers: the search runs in a hidden frame instead, which answers in the same way.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.frame = frame
      const inside = frame.contentWindow
      const load = source =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script")
          script.onload = done
          script.onerror = failed
          script.src = source
          inside.document.body.append(script)
        })
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      this.ready = load(url)
      this.ready.catch(error => this.dispatchEvent(new ErrorEvent("error", { error })))
    }

    postMessage(data) {
      const inside = this.frame.contentWindow
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
