"""Chinese for the sentences of explanations, searches and reports; keys are the English templates."""

CHINESE = {
    "{mesh}, micro-batch {size} x {count}: {time} a step, {tokens} tokens/s, MFU {mfu}, {memory} of {limit} per "
    "device": (
        "{mesh}，微批 {size} x {count}：每步 {time}，{tokens} tokens/s，MFU {mfu}，每设备显存 {memory}（上限 {limit}）"
    ),
    "Most of the step, {share}, is {part}.": "每步时间的大部分（{share}）是{part}。",
    "Links that the axes cross: {pairs}.": "各并行维度跨越的链路：{pairs}。",
    "No resource is a bottleneck: doubling any of them gains less than {least}.": (
        "没有瓶颈资源：任一资源加倍，增益都不到 {least}。"
    ),
    "The first bottleneck is {what}.": "首要瓶颈是{what}。",
    "  Doubling {what}: {time} a step, {gain} more tokens/s.": "  {what}加倍：每步 {time}，tokens/s 提高 {gain}。",
    "  Doubling {what}: no gain.": "  {what}加倍：没有增益。",
    "the bandwidth of the {scope} link": "{scope} 链路的带宽",
    "It does NOT fit: the fullest device needs {over} more.": "放不下：最满的设备还差 {over}。",
    "compute speed": "计算速度",
    "device memory": "设备显存",
    "the global batch": "全局批量",
    "no recomputation": "不重计算",
    "micro-batch doubled": "微批加倍",
    "parameters replicated": "参数不切分",
    "more micro-batches": "更多微批",
    "larger micro-batches": "更大的微批",
    "component": "组成部分",
    "seconds": "时间",
    "share": "占比",
    "stage": "流水级",
    "blocks": "块数",
    "forward": "前向",
    "backward": "反向",
    "idle": "空闲",
    "states": "模型状态",
    "activations": "激活",
    "other": "其他",
    "peak": "峰值",
    "block kind": "块类型",
    "count": "数量",
    "compute": "计算",
    "communication": "通信",
    "saved per micro-batch": "每微批保存",
    "between blocks": "块之间",
    "tensor-parallel communication": "张量并行通信",
    "data-parallel communication": "数据并行通信",
    "context-parallel communication": "上下文并行通信",
    "expert-parallel communication": "专家并行通信",
    "pipeline communication": "流水线通信",
    "pipeline bubble": "流水线气泡",
    "optimizer": "优化器",
    # reports
    "{parameters} parameters, {devices} x {device}, {batch} samples a step": (
        "{parameters} 参数，{devices} x {device}，每步 {batch} 个样本"
    ),
    "a step, predicted": "每步（预测）",
    "tokens/s, all devices": "tokens/s，全部设备",
    "of {limit} per device": "每设备显存，上限 {limit}",
    "at most above the proven bound": "与已证下界的最大差距",
    "The plan": "方案",
    "Where the time goes": "时间花在哪里",
    "Time and memory by stage": "各流水级的时间与显存",
    "Network and placements": "网络与切分",
    "The operators of the most frequent block": "最常见块的算子",
    "Assumptions and sources": "假设与来源",
    "setting": "设置",
    "value": "取值",
    "micro-batch x micro-batches": "微批 x 微批数",
    "schedule, virtual stages x ranks": "调度，虚拟级 x 流水级",
    "first blocks of the stages": "各流水级的首个块",
    "gradient sums": "梯度求和",
    "Every number is a prediction; nothing on this page was measured while training.": (
        "所有数字都是预测；本页没有任何训练中的实测值。"
    ),
    "Operators and collectives were measured on the device.": "算子与集合通信在该设备上实测。",
    "Nothing was measured on the device itself: rates and efficiencies are those of its profile.": (
        "没有在该设备上实测：速率与效率取自其配置文件。"
    ),
    "Device {name}: {sources}.": "设备 {name}：{sources}。",
    "Link {scope}: {rate} Gbit/s per device and direction, {latency} a hop, {devices} devices in a domain.": (
        "链路 {scope}：每设备每方向 {rate} Gbit/s，每跳 {latency}，每域 {devices} 个设备。"
    ),
    "{reserve} of every device are kept free.": "每个设备预留 {reserve}。",
    "No plan of the searched space is predicted below {bound} a step.": "搜索空间内没有方案的预测低于每步 {bound}。",
    "The search kept these pins: {pins}.": "搜索保留了这些固定选择：{pins}。",
    "Made by autopar {version}; model fingerprint {print}.": "由 autopar {version} 生成；模型指纹 {print}。",
    # searches
    "mesh": "设备网格",
    "batch": "批",
    "pipe": "流水",
    "saving": "节省",
    "step": "每步",
    "vs #1": "与 #1 比",
    "recompute {kind}": "重计算 {kind}",
    "data": "数据并行",
    "tensor": "张量并行",
    "pipeline": "流水线并行",
    "Megatron": "Megatron 式",
    "not possible": "不可行",
    "The best plan is {mesh}; no baseline with another mesh can run here.": (
        "最佳方案是 {mesh}；其他网格的基线都无法在此运行。"
    ),
    "The {name} plan ({theirs}) is predicted {gain} faster than {mesh}, the best of what was asked for.": (
        "{name}方案（{theirs}）预测比所求中最好的 {mesh} 快 {gain}。"
    ),
    "{mesh} and {name} are predicted equally fast.": "{mesh} 与{name}预测一样快。",
    "{mesh} is predicted {gain} faster than the {name} plan ({theirs}), mostly by {saved} less {what} a step.": (
        "{mesh} 预测比{name}方案（{theirs}）快 {gain}，主要因为每步少 {saved} 的{what}。"
    ),
    "No plan can take less than {bound} a step (predicted): the best is within {gap} of it. Searched for "
    "{time}{end}.": ("没有方案能低于每步 {bound}（预测）：最佳方案与之相差不超过 {gap}。搜索用时 {time}{end}。"),
    ", stopped at the time limit": "，到时限停止",
    "Plan written to {path}": "方案已写入 {path}",
    # why not
    "Why not {question}? The plan does that.": "为什么不用 {question}？方案正是如此。",
    "Why not {question}? Nothing fits then: {reason}": "为什么不用 {question}？那样什么都放不下：{reason}",
    "Why not {question}? It is as good: {plan} takes {time} a step.": (
        "为什么不用 {question}？一样好：{plan} 每步 {time}。"
    ),
    "Why not {question}? The best with it ({plan}) takes {time} a step, {share} longer, mostly by {seconds} "
    "more {part}.": (
        "为什么不用 {question}？这样最好的方案（{plan}）每步 {time}，慢 {share}，主要因为多 {seconds} 的{part}。"
    ),
    "Why not {question}? It is better: {plan} takes {time} a step, {share} less, mostly by {seconds} less {part}.": (
        "为什么不用 {question}？它更好：{plan} 每步 {time}，少 {share}，主要因为少 {seconds} 的{part}。"
    ),
    # comparisons
    "change": "变化",
    "cluster": "集群",
    "devices": "设备数",
    "global batch": "全局批量",
    "micro-batch": "微批",
    "micro-batches": "微批数",
    "schedule": "调度",
    "stages": "流水级",
    "recompute": "重计算",
    "ZeRO stage": "ZeRO 级",
    "precision": "精度",
    "step time (s)": "每步时间 (s)",
    "peak reserved (GiB)": "预留显存峰值 (GiB)",
    "memory limit (GiB)": "显存上限 (GiB)",
    "fits": "放得下",
    "yes": "是",
    "no": "否",
    "operators placed differently": "切分不同的算子",
    "operators in both": "两者共有的算子",
    "none": "无",
    "full": "全部",
    "selective": "选择性",
    "mixed": "混合",
}
