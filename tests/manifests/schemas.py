"""Strict JSON schemas of everything that config/kubernetes contains, out of Python packages that carry the types.

Kubernetes' own kinds come as JSON schemas already. The kinds of KEDA, the Prometheus operator and KServe come as Python classes
made from their custom resource definitions; their source is read, never run, and turned into schemas that refuse unknown
fields. Rules in the CEL language are in neither and are not checked.
"""
import ast
import json
import re
import zipfile
from pathlib import Path

KUBERNETES = "1.37.0"
CORE = f"kubernetes_validate/kubernetes-json-schema/v{KUBERNETES}-local-strict/_definitions.json"
SCALARS = {"str": {"type": "string"}, "int": {"type": "integer"}, "bool": {"type": "boolean"}, "float": {"type": "number"},
           "Any": {}, "object": {}, "dict": {"type": "object"}, "list": {"type": "array"}, "None": {"type": "null"}, "AwareDatetime": {"type": "string"}, "datetime": {"type": "string"}}
BOUNDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum", "pattern": "pattern"}
LENGTHS = {"min_length": "min", "max_length": "max"}


def schemas(folder):
    """One schema document, and which of its definitions each (apiVersion, kind) has. `folder` holds the packages."""
    wheel = lambda name: zipfile.ZipFile(next(Path(folder).glob(f"{name}-*.whl")))
    definitions = json.loads(wheel("kubernetes_validate").read(CORE))["$defs"]
    kinds = {}
    for name, definition in definitions.items():
        for known in definition.get("x-kubernetes-group-version-kind", []):
            kinds["/".join(filter(None, [known["group"], known["version"]])), known["kind"]] = name
    for package, file, version, kind in [
        ("cloudcoil_models_keda", "cloudcoil/models/keda/v1alpha1.py", "keda.sh/v1alpha1", "ScaledObject"),
        ("cloudcoil_models_prometheus_operator", "cloudcoil/models/prometheus_operator/v1.py", "monitoring.coreos.com/v1", "PodMonitor"),
    ]:
        found = annotated(wheel(package).read(file).decode(), prefix=f"{package}.")
        kinds[version, kind] = f"{package}.{kind}"
        definitions |= found
    source = wheel("kserve")
    texts = [source.read(name).decode() for name in source.namelist() if re.fullmatch(r"kserve/models/\w+\.py", name)]
    definitions |= generated(texts, "kserve.", core_names(definitions))
    kinds["serving.kserve.io/v1alpha1", "ClusterServingRuntime"] = "kserve.V1alpha1ClusterServingRuntime"
    kinds["serving.kserve.io/v1beta1", "InferenceService"] = "kserve.V1beta1InferenceService"
    return {"$defs": definitions}, kinds


def reference(name):
    return {"$ref": f"#/$defs/{name}"}


def strict(properties, required):
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def core_names(definitions):
    """What the generated clients call Kubernetes' own types: V1Container for io.k8s.api.core.v1.Container."""
    names = {}
    for name in definitions:
        match = re.fullmatch(r"io\.k8s\.(?:api\.\w+|apimachinery\.pkg\.apis\.meta)\.(v\w+)\.(\w+)", name)
        if match:
            version, kind = match.groups()
            names.setdefault(version[0].upper() + version[1:] + kind, name)
    return names


# ---- classes with annotations ------------------------------------------------------------------------------------------


def annotated(text, prefix):
    """Definitions from classes whose fields are annotated, with the wire's name as the alias of each field."""
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    definitions = {}
    for name, node in classes.items():
        properties, required = {}, []
        for field in node.body:
            if not isinstance(field, ast.AnnAssign):
                continue
            schema, alias = of_annotation(field.annotation, prefix, classes)
            properties[alias or field.target.id] = schema
            if field.value is None:
                required.append(alias or field.target.id)
        if "root" in properties:
            definitions[prefix + name] = properties["root"]
        elif any(ast.unparse(base).endswith("Resource") for base in node.bases):
            properties |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": metadata()}
            definitions[prefix + name] = strict(properties, [*required, "metadata"])
        else:
            definitions[prefix + name] = strict(properties, required)
    return definitions


def metadata():
    return reference("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")


def of_annotation(node, prefix, classes):
    """The schema of an annotation, and the alias that it gives."""
    if isinstance(node, ast.Constant) and node.value is None:
        return SCALARS["None"], None
    if isinstance(node, ast.Constant):
        return of_annotation(ast.parse(str(node.value), mode="eval").body, prefix, classes)
    if isinstance(node, ast.BinOp):
        return {"anyOf": [of_annotation(side, prefix, classes)[0] for side in (node.left, node.right)]}, None
    if isinstance(node, ast.Subscript):
        head = ast.unparse(node.value).rsplit(".", 1)[-1]
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if head == "Literal":
            return {"enum": [ast.literal_eval(value) for value in inner]}, None
        first = of_annotation(inner[-1 if head in ("dict", "Dict") else 0], prefix, classes)[0]
        if head == "Annotated":
            return constrained(first, inner[1:])
        if head in ("list", "List"):
            return {"type": "array", "items": first}, None
        if head in ("dict", "Dict"):
            return {"type": "object", "additionalProperties": first}, None
        return ({"anyOf": [first, {"type": "null"}]} if head == "Optional" else first), None
    name = ast.unparse(node)
    if name in classes:
        return reference(prefix + name), None
    if name.endswith("ObjectMeta"):
        return metadata(), None
    if name.endswith("IntOrString"):
        return {"type": ["integer", "string"]}, None
    return SCALARS[name], None


def constrained(schema, extras):
    """What `Field(...)` adds: bounds and the alias."""
    given = {word.arg: word.value for extra in extras if isinstance(extra, ast.Call) for word in extra.keywords}
    values = {name: ast.literal_eval(value) for name, value in given.items() if isinstance(value, (ast.Constant, ast.UnaryOp))}
    bounds = {BOUNDS[name]: value for name, value in values.items() if name in BOUNDS}
    kind = "Items" if "array" in json.dumps(schema)[:40] else "Length"
    bounds |= {LENGTHS[name] + kind: value for name, value in values.items() if name in LENGTHS}
    # A bound of something that may be absent is a bound of what is there.
    options = [option | bounds if option != {"type": "null"} and "$ref" not in option else option for option in schema.get("anyOf", [])]
    return ({"anyOf": options} if options else schema | bounds), values.get("alias")


# ---- classes of the OpenAPI generator ----------------------------------------------------------------------------------


def generated(texts, prefix, core):
    """Definitions from classes with the tables `openapi_types` and `attribute_map`."""
    tables = {}
    for text in texts:
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                found = {part.targets[0].id: part.value for part in node.body
                         if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name)}
                if {"openapi_types", "attribute_map"} <= set(found):
                    types, names = (ast.literal_eval(found[table]) for table in ("openapi_types", "attribute_map"))
                    needed = re.findall(r"Invalid value for `(\w+)`, must not be `None`", ast.unparse(node))
                    tables[node.name] = types, names, [names[name] for name in needed]
    definitions = {}
    for name, (types, names, required) in tables.items():
        properties = {names[field]: of_generated(kind, prefix, tables, core) for field, kind in types.items()}
        definitions[prefix + name] = strict(properties, sorted(set(required)))
    return definitions


def of_generated(kind, prefix, tables, core):
    if match := re.fullmatch(r"list\[(.*)\]", kind):
        return {"type": "array", "items": of_generated(match[1], prefix, tables, core)}
    if match := re.fullmatch(r"dict\(str, (.*)\)", kind):
        return {"type": "object", "additionalProperties": of_generated(match[1], prefix, tables, core)}
    if kind in tables:
        return reference(prefix + kind)
    if kind in core:
        return reference(core[kind])
    return SCALARS.get(kind, {})
