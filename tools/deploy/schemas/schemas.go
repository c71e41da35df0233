// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	security "github.com/openshift/api/security/v1"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// nodeReadinessRule is the part of node-readiness-controller's kind that manifests have; the module proxy has no
// module of it.
type nodeReadinessRule struct {
	meta.TypeMeta   `json:",inline"`
	meta.ObjectMeta `json:"metadata"`
	Spec            nodeReadinessSpec `json:"spec"`
}

type nodeReadinessSpec struct {
	Conditions      []nodeReadinessCondition `json:"conditions"`
	EnforcementMode string                   `json:"enforcementMode"`
	Taint           core.Taint               `json:"taint"`
	NodeSelector    meta.LabelSelector       `json:"nodeSelector"`
	DryRun          bool                     `json:"dryRun,omitempty"`
}

type nodeReadinessCondition struct {
	Type           string               `json:"type"`
	RequiredStatus core.ConditionStatus `json:"requiredStatus"`
}

// kinds returns the allowed types by the names that kubeconform gives their schemas: KIND-GROUP-VERSION.
func kinds() map[string]any {
	return map[string]any{
		"configmap-v1":                           core.ConfigMap{},
		"pod-v1":                                 core.Pod{},
		"serviceaccount-v1":                      core.ServiceAccount{},
		"daemonset-apps-v1":                      apps.DaemonSet{},
		"clusterrole-rbac-v1":                    rbac.ClusterRole{},
		"clusterrolebinding-rbac-v1":             rbac.ClusterRoleBinding{},
		"podmonitor-monitoring-v1":               monitoring.PodMonitor{},
		"prometheusrule-monitoring-v1":           monitoring.PrometheusRule{},
		"securitycontextconstraints-security-v1": security.SecurityContextConstraints{},
		"nodereadinessrule-readiness-v1alpha1":   nodeReadinessRule{},
	}
}

// writeSchemas writes the JSON schema of each kind into a directory.
func writeSchemas(directory string) error {
	for name, object := range kinds() {
		definitions := map[string]any{}
		root := schema(reflect.TypeOf(object), definitions)
		root = map[string]any{"allOf": []any{root}, "definitions": definitions}
		text, err := json.Marshal(root)
		if err != nil {
			return fmt.Errorf("encode the schema of %s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(directory, name+".json"), text, 0o644); err != nil {
			return fmt.Errorf("write the schema of %s: %w", name, err)
		}
	}
	return nil
}

// schema returns the JSON schema of a type, and adds those of structs to definitions. A field without omitempty is
// required, as the API types have it.
func schema(t reflect.Type, definitions map[string]any) map[string]any {
	switch t.Kind() {
	case reflect.Pointer:
		return map[string]any{"anyOf": []any{map[string]any{"type": "null"}, schema(t.Elem(), definitions)}}
	case reflect.String:
		return map[string]any{"type": "string"}
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.Int, reflect.Int32, reflect.Int64:
		return map[string]any{"type": "integer"}
	case reflect.Float64:
		return map[string]any{"type": "number"}
	case reflect.Map:
		return map[string]any{"type": []string{"object", "null"}, "additionalProperties": schema(t.Elem(), definitions)}
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return map[string]any{"type": "string"}
		}
		return map[string]any{"type": []string{"array", "null"}, "items": schema(t.Elem(), definitions)}
	case reflect.Struct:
	default:
		return map[string]any{}
	}
	if _, is := reflect.New(t).Interface().(json.Unmarshaler); is { // IntOrString, Quantity, Time
		return map[string]any{"type": []string{"string", "number", "null"}}
	}
	name := strings.ReplaceAll(t.PkgPath(), "/", ".") + "." + t.Name()
	if definitions[name] == nil {
		object := map[string]any{"type": "object", "additionalProperties": false}
		definitions[name] = object // before its fields: a type may contain itself
		properties := map[string]any{}
		object["properties"] = properties
		if required := fields(t, properties, nil, definitions); len(required) > 0 { // an empty list is no schema
			object["required"] = required
		}
	}
	return map[string]any{"$ref": "#/definitions/" + name}
}

// fields adds the properties of a struct, and of those that it embeds, and returns the required ones.
func fields(t reflect.Type, properties map[string]any, required []string, definitions map[string]any) []string {
	for f := range t.Fields() {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported():
		case name == "" && f.Anonymous:
			inner := f.Type
			if inner.Kind() == reflect.Pointer {
				inner = inner.Elem()
			}
			required = fields(inner, properties, required, definitions)
		default:
			properties[name] = schema(f.Type, definitions)
			if !strings.Contains(options, "omit") {
				required = append(required, name)
			}
		}
	}
	return required
}
