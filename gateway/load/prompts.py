"""Prompts of our own writing, in English and Chinese: short questions for a light model, long tasks for a heavy one.

A pool is a product of openings and subjects, so a few dozen phrases give thousands of distinct prompts, the same ones
for the same seed on every machine.
"""

from __future__ import annotations

import itertools
import random

_LIGHT_EN = (
    "Hello, can you tell me about {}?",
    "Quick question: what is {}?",
    "Where do I find {}?",
    "Hi! Who do I ask about {}?",
    "Is there anything new with {} today?",
    "Thanks. One more thing: {}, please?",
    "Give me one sentence on {}.",
    "When can I change {}?",
)
_LIGHT_ZH = (
    "你好,请问{}怎么办?",
    "{}是什么?",
    "在哪里可以看到{}?",
    "谢谢,我还想了解一下{}。",
    "用一句话介绍{}。",
    "请问{}今天有变化吗?",
)
_SUBJECTS_EN = (
    "your opening hours", "my delivery date", "the return address", "the gift card balance", "the student discount",
    "my last invoice", "the parking garage", "the loyalty points", "the newsletter", "the size chart",
    "the warranty period", "store pickup", "the lost parcel", "the monthly plan", "the mobile app",
    "my user name", "the refund of my order", "the waiting list", "the summer menu", "the reading corner",
)  # fmt: skip
_SUBJECTS_ZH = (
    "营业时间", "快递进度", "退货地址", "会员积分", "学生优惠", "上个月的账单", "停车位", "优惠券", "尺码表", "保修期",
    "到店自取", "丢失的包裹", "包月套餐", "手机应用", "修改用户名", "订单退款", "候补名单", "夏季菜单", "阅读角", "礼品卡余额",
)  # fmt: skip
_HEAVY_EN = (
    "Compare three ways to build {}, with the trade-offs of each, and recommend one step by step.",
    "Write a Python function for {}, explain its complexity, and prove that it always ends.",
    "Derive the formulas behind {}, then check them on two worked examples.",
    "Review the following notes on {} and list every contradiction with the reasons.",
    "Design an experiment about {}: hypotheses, sample size, statistics, and what would refute it.",
)
_HEAVY_ZH = (
    "请比较实现{}的三种方案,逐步分析优缺点并给出建议。",
    "请用 Python 写出{}的代码,分析时间复杂度,并证明它一定会终止。",
    "请推导{}背后的公式,并用两个例子验证。",
    "请设计一个关于{}的实验:假设、样本量、统计方法,以及如何证伪。",
)
_TOPICS_EN = (
    "a rate limiter shared by many hosts", "an index for similar sentences", "a schedule for night trains",
    "an online ranking of news", "a ledger that never loses a cent", "a forecast of electricity use",
    "a compiler for table formulas", "a cache that answers stale data safely", "a fair queue for hospital beds",
    "a model of traffic at a crossing", "a search over scanned letters", "a price for flood insurance",
)  # fmt: skip
_TOPICS_ZH = (
    "多机共享的限流器", "相似句子的索引", "夜间列车时刻表", "新闻的在线排序", "不丢一分钱的账本", "用电量预测",
    "表格公式的编译器", "允许陈旧数据的缓存", "公平的床位排队", "十字路口的交通模型", "扫描信件的检索", "洪水保险的定价",
)  # fmt: skip
#: Sentences that make a prompt longer without changing what it asks.
_FILLER = (
    "The team has kept notes since last spring and wants every claim tied to one of them.",
    "Two of the earlier attempts failed because nobody had measured the slow cases.",
    "Readers know the basics but not the vocabulary of this field.",
    "Figures should carry their units and the conditions under which they were taken.",
    "预算有限,因此每一步都要说明成本。",
    "请注意边界情况,例如输入为空、重复或者顺序颠倒。",
    "A colleague will repeat the work from the text alone, without asking back.",
    "Where two sources disagree, say which one you follow and why.",
)


def light_pool(count: int, rng: random.Random) -> list[str]:
    """`count` distinct short prompts, about a third of them Chinese."""
    return _pool(count, rng, [(_LIGHT_EN, _SUBJECTS_EN), (_LIGHT_ZH, _SUBJECTS_ZH)])


def heavy_pool(count: int, rng: random.Random) -> list[str]:
    """`count` distinct long tasks of roughly 60 to 250 tokens."""
    prompts = _pool(count, rng, [(_HEAVY_EN, _TOPICS_EN), (_HEAVY_ZH, _TOPICS_ZH)])
    return [sized(prompt, rng.randint(60, 250)) for prompt in prompts]


def sized(prompt: str, tokens: int) -> str:
    """The prompt, drawn out (never cut) to about `tokens` tokens."""
    missing = tokens - rough_tokens(prompt)
    if missing <= 0:
        return prompt
    parts = [prompt]
    for sentence in itertools.cycle(_FILLER):
        parts.append(sentence)
        missing -= rough_tokens(sentence)
        if missing <= 0:
            return " ".join(parts)
    raise AssertionError("cycle never ends")


def rough_tokens(text: str) -> int:
    """About how many tokens a text has: 4 characters of Latin script or 1.5 of Chinese each."""
    wide = sum(ord(character) > 0x2E80 for character in text)
    return round(wide / 1.5 + (len(text) - wide) / 4)


def _pool(count: int, rng: random.Random, grids: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    texts = [opening.format(subject) for openings, subjects in grids for opening in openings for subject in subjects]
    rng.shuffle(texts)
    # A larger pool is made of numbered variants: still distinct, still the same kind of prompt.
    rounds = range(-(-count // len(texts)))
    return [text if turn == 0 else f"{text} ({turn + 1})" for turn in rounds for text in texts][:count]
