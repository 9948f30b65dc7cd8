import logging
import sys
import threading
import types

from comfyui_vc_attention.nodes.run_report import RunReport, say


def filled():
    report = RunReport("Wan", steps=40)
    for step in (0, 1):
        report.add_taken("triton_int8_fp8 int8_fp8", 32760, step)
    report.add_taken("triton_int8_fp8 int8_fp8", 32760, None)
    report.add_declined("cross-attention")
    report.add_groupings(2, 3 * 2**20)
    return report


def test_p06_counters_sum_to_the_calls_received():
    report = filled()
    assert report.received == 4 == report.taken + sum(report.declined.values())


def test_p05_summary_tells_what_ran_and_how_long_the_clip_is():
    text = filled().summary()
    for part in (
        "3 of 4 calls",
        "triton_int8_fp8",
        "1 cross-attention",
        "32,760 tokens",
        "2 of 40 steps",
        "3.0 MiB",
    ):
        assert part in text


def test_no_calls_is_said_with_the_culprit():
    report = RunReport("Wan")
    report.overwritten_by = "comfy.model_patcher.other"
    assert "received 0 calls: comfy.model_patcher.other replaced the attention" in report.summary()


def test_failure_is_news_once():
    report = RunReport("Wan")
    assert report.add_failure("cuda", "broken") and not report.add_failure("cuda", "broken")
    report.add_declined("kernel cuda failed")
    assert "cuda failed: broken" in report.summary()


def test_threads_lose_no_count():
    report = RunReport("Wan")
    threads = [
        threading.Thread(target=lambda: [report.add_taken("k", 1, 0) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert report.received == report.taken == report.kernels["k"] == 8000


def test_say_logs_and_shows_on_the_node(monkeypatch, caplog):
    sent = []
    server = types.ModuleType("server")
    instance = types.SimpleNamespace(send_progress_text=lambda text, node: sent.append((text, node)))
    server.PromptServer = types.SimpleNamespace(instance=instance)
    monkeypatch.setitem(sys.modules, "server", server)
    with caplog.at_level(logging.INFO, "vc_attention"):
        say("hello", node_id="7")
    assert sent == [("hello", "7")] and "[VC-Attention] hello" in caplog.text


def test_say_needs_no_server(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "server", raising=False)
    with caplog.at_level(logging.INFO, "vc_attention"):
        say("hello", node_id="7")
    assert "hello" in caplog.text


def test_a_stopped_run_warns_and_still_counts():
    report = filled()
    report.stopped = True
    assert report.status()["warning"] == "Sampling was stopped before its end"
    assert report.status()["taken"] == 3
