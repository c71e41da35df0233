// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"

	security "github.com/openshift/api/security/v1"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	admission "k8s.io/api/admissionregistration/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// kinds returns the allowed types by apiVersion and kind.
func kinds() map[string]func() any {
	return map[string]func() any{
		"v1/ConfigMap":       func() any { return new(core.ConfigMap) },
		"v1/Pod":             func() any { return new(core.Pod) },
		"v1/ServiceAccount":  func() any { return new(core.ServiceAccount) },
		"apps/v1/DaemonSet":  func() any { return new(apps.DaemonSet) },
		"apps/v1/Deployment": func() any { return new(apps.Deployment) },
		"admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy":        func() any { return new(admission.ValidatingAdmissionPolicy) },
		"admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding": func() any { return new(admission.ValidatingAdmissionPolicyBinding) },
		"rbac.authorization.k8s.io/v1/ClusterRole":                         func() any { return new(rbac.ClusterRole) },
		"rbac.authorization.k8s.io/v1/ClusterRoleBinding":                  func() any { return new(rbac.ClusterRoleBinding) },
		"rbac.authorization.k8s.io/v1/Role":                                func() any { return new(rbac.Role) },
		"rbac.authorization.k8s.io/v1/RoleBinding":                         func() any { return new(rbac.RoleBinding) },
		"monitoring.coreos.com/v1/PodMonitor":                              func() any { return new(monitoring.PodMonitor) },
		"monitoring.coreos.com/v1/PrometheusRule":                          func() any { return new(monitoring.PrometheusRule) },
		"security.openshift.io/v1/SecurityContextConstraints":              func() any { return new(security.SecurityContextConstraints) },
	}
}

// check returns the mistakes of manifests.
func check(in io.Reader) (mistakes []error) {
	documents := utilyaml.NewYAMLReader(bufio.NewReader(in))
	for count := 0; ; count++ {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			if count == 0 {
				mistakes = append(mistakes, errors.New("no object given"))
			}
			return mistakes
		}
		if err != nil {
			return append(mistakes, fmt.Errorf("read manifests: %w", err))
		}
		if err := object(document); err != nil {
			mistakes = append(mistakes, err)
		}
	}
}

// object decodes one document strictly and checks its content.
func object(document []byte) error {
	var about meta.PartialObjectMetadata
	if err := yaml.Unmarshal(document, &about); err != nil {
		return fmt.Errorf("read object: %w", err)
	}
	name := about.Kind + "/" + about.Name
	create, known := kinds()[about.APIVersion+"/"+about.Kind]
	if !known {
		return fmt.Errorf("%s: %s %s is no kind that is known here", name, about.APIVersion, about.Kind)
	}
	object := create()
	if err := yaml.UnmarshalStrict(document, object); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	switch o := object.(type) {
	case *apps.DaemonSet:
		return selects(name, o.Spec.Selector, o.Spec.Template.Labels)
	case *apps.Deployment:
		return selects(name, o.Spec.Selector, o.Spec.Template.Labels)
	}
	return nil
}

// selects reports a selector that does not match the labels of the pod template, which the API
// server refuses.
func selects(name string, of *meta.LabelSelector, labels map[string]string) error {
	if of == nil || len(of.MatchLabels) == 0 {
		return fmt.Errorf("%s: selects nothing", name)
	}
	for key, value := range of.MatchLabels {
		if labels[key] != value {
			return fmt.Errorf("%s: selects pods with %s=%s, which its own do not have", name, key, value)
		}
	}
	return nil
}
