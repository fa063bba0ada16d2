"""Uses the page of `ringspan serve` at `/` in a headless Chromium as a person would: enters the API key, chats, and starts a new chat;
checks the texts, the list of models, the engine's numbers, the tokens per second, and the cache's pages of each rank. A model without a
chat template continues texts.

    check_page.py PROGRAM        needs chromium and chromedriver
"""

import argparse
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait
from tiny_server import server, write_model

SECONDS = 30
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip


@contextmanager
def browser(folder):
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if not driver or not chromium:
        sys.exit("check_page.py needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={folder}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield opened
        severe = [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE" and "401" not in entry["message"]]
        assert not severe, severe
    finally:
        opened.quit()


class Page:
    def __init__(self, driver):
        self.driver = driver

    def at(self, name):
        return self.driver.find_element(By.ID, name)

    def until(self, what, holds):
        try:
            WebDriverWait(self.driver, SECONDS, poll_frequency=0.05).until(lambda _: holds())
        except Exception as error:
            raise AssertionError(f"{what}; the page shows: {self.driver.find_element(By.TAG_NAME, 'body').text}") from error

    def messages(self):
        lines = self.driver.find_elements(By.CLASS_NAME, "message")
        return [(line.get_attribute("class").split()[1], line.get_property("textContent")) for line in lines]

    def rate(self, name):
        # A dash until two samples were taken.
        text = self.at(name).text
        return float(text) if text != "–" else 0.0

    def is_idle(self):
        return self.at("send").text == "Send"

    def say(self, text):
        self.at("text").send_keys(text + Keys.ENTER)


def check_chat(page, client):
    page.until("without a key the page says what is missing", lambda: "needs an API key" in page.at("state").text)
    page.at("key").send_keys("secret" + Keys.TAB)
    page.until("the models are listed", lambda: [o.text for o in Select(page.at("model")).options] == ["tiny"])

    page.until("the page takes samples of the engine's counters", lambda: page.at("generated").text == "0.0")
    page.say("Hello")
    # The page samples each second, so the prompt and its answer may be in different samples; each rate is shown for a second.
    seen = set()
    page.until(
        "tokens are counted per second while a message is answered",
        lambda: seen.update(name for name in ("prompt", "generated") if page.rate(name) > 0) or len(seen) == 2,
    )
    page.until("a message is answered", lambda: page.is_idle() and len(page.messages()) == 2)
    conversation = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model="tiny", messages=conversation).choices[0].message.content
    # What is no character becomes U+FFFD on both ways.
    assert page.messages() == [("user", "Hello"), ("assistant", answer)], (page.messages(), answer)
    page.say("More")
    page.until("a second one is answered", lambda: page.is_idle() and len(page.messages()) == 4)
    conversation += [{"role": "assistant", "content": answer}, {"role": "user", "content": "More"}]
    more = client.chat.completions.create(model="tiny", messages=conversation).choices[0].message.content
    assert page.messages()[2:] == [("user", "More"), ("assistant", more)], "the page sends the whole conversation"

    for name in ["ranks", "window-ranks"]:
        ranks = lambda: page.at(name).text.splitlines()
        page.until(f"both {name} have cached pages", lambda: len(ranks()) == 2 and all(" 0 cached" not in line for line in ranks()))
    page.until("the hits of the cache are counted", lambda: page.at("hits").text.endswith("%") and page.at("hits").text != "0 %")
    page.until("nothing runs", lambda: (page.at("running").text, page.at("waiting").text) == ("0", "0"))
    page.until("no tokens are counted any more", lambda: page.rate("prompt") == page.rate("generated") == 0)
    page.at("clear").click()
    assert page.messages() == []


def check_text(page, client):
    page.until("the page says that there is no chat", lambda: "no chat template" in page.at("text").get_attribute("placeholder"))
    assert page.at("clear").text == "New text"
    page.say(" Once")
    page.until("a text is continued", lambda: page.is_idle() and len(page.messages()) == 2)
    written = lambda: "".join(text for _, text in page.messages())
    continued = lambda text: text + client.completions.create(model="tiny", prompt=text, max_tokens=256).choices[0].text
    text = continued(" Once")
    assert written() == text, (page.messages(), text)
    page.say("")
    page.until("it goes on", lambda: page.is_idle() and len(page.messages()) == 3)
    text = continued(text)
    assert written() == text, (page.messages(), text)
    page.say("upon")
    page.until("it goes on behind further words", lambda: page.is_idle() and len(page.messages()) == 5)
    assert written() == continued(text + "upon"), page.messages()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("program")
    args = parser.parse_args()
    for check, chat in [(check_chat, True), (check_text, False)]:
        check_page(args.program, check, chat)
    print("the page answers as expected")


def check_page(program, check, chat):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model = Path(folder) / "model"
        model.mkdir()
        # Sliding-window layers have pages of their own, which the page shows as well.
        write_model(model, window=256, chat=chat)
        (model / "generation_config.json").write_text('{"do_sample": false, "temperature": 0, "max_new_tokens": 24}')
        command = [program, "serve", "--model", str(model), "--model-name", "tiny", "--port", "0", "--ring", "2", "--threads", "1"]
        command += ["--kv-cache", "4MiB"]
        if chat:
            keys = Path(folder) / "keys"
            keys.write_text("secret\n")
            command += ["--api-key-file", str(keys)]
        with server(command) as (url, _), browser(folder + "/browser") as driver:
            driver.get(url)
            check(Page(driver), OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0))


if __name__ == "__main__":
    main()
