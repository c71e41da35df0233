// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
)

// Pod is a pod that runs the program e2e/containerd/pod.
type Pod struct {
	Name string
	// Node is the pod's node; without it the scheduler chooses.
	Node *Node
	// HostNetwork runs the pod in the node's network namespace.
	HostNetwork bool
	// Args are arguments of the program: "serve", "8080", "far".
	Args []string
	// Restart restarts the container when it ends, and with the node.
	Restart bool
}

// PeerPort is the port of serving pods.
const PeerPort = 8080

// Serving returns the Args of a pod that answers at PeerPort with this name.
func Serving(name string) []string { return []string{"serve", fmt.Sprint(PeerPort), name} }

// Streaming returns the Args of a pod that sends to the addresses without pause.
func Streaming(to ...netip.Addr) []string {
	args := []string{"stream"}
	for _, address := range to {
		args = append(args, Flow{Protocol: "udp", To: netip.AddrPortFrom(address, StreamPort)}.String())
	}
	return args
}

// object is a Kubernetes object, or a part of one.
type object = map[string]any

func (p Pod) object() object {
	spec := object{
		"hostNetwork":                   p.HostNetwork,
		"restartPolicy":                 map[bool]string{true: "Always", false: "Never"}[p.Restart],
		"terminationGracePeriodSeconds": 5,
		"automountServiceAccountToken":  false,
		"enableServiceLinks":            false,
		"dnsPolicy":                     "Default",
		"containers": []object{{
			"name": "pod", "image": containerd.PodImage, "imagePullPolicy": "Never", "args": p.Args,
		}},
		// Tests break and reboot nodes; their pods must stay.
		"tolerations": []object{
			{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"},
			{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"},
		},
	}
	if p.Node != nil {
		spec["nodeSelector"] = object{"kubernetes.io/hostname": p.Node.Name}
	}
	return object{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": object{"name": p.Name, "labels": object{"app": p.Name}},
		"spec":     spec,
	}
}

// Create creates pods in the namespace default without waiting for them.
func (c *Cluster) Create(ctx context.Context, pods ...Pod) error {
	items := make([]object, len(pods))
	for i, p := range pods {
		items[i] = p.object()
	}
	text, err := json.Marshal(object{"apiVersion": "v1", "kind": "List", "items": items})
	if err != nil {
		return fmt.Errorf("encode pods: %w", err)
	}
	return c.Apply(ctx, string(text))
}

// Start creates pods and waits until they run.
func (c *Cluster) Start(ctx context.Context, pods ...Pod) error {
	if err := c.Create(ctx, pods...); err != nil {
		return err
	}
	for _, p := range pods {
		if _, err := c.AwaitRunning(ctx, p.Name); err != nil {
			return err
		}
	}
	return nil
}

// AwaitRunning waits until a pod in the namespace default is ready and returns its address.
func (c *Cluster) AwaitRunning(ctx context.Context, name string) (address netip.Addr, err error) {
	err = Await(ctx, Patience, func() error {
		var pod struct {
			Status struct {
				PodIP      string
				Phase      string
				Conditions []condition
			}
		}
		if err := c.Get(ctx, &pod, "pod", name); err != nil {
			return err
		}
		for _, condition := range pod.Status.Conditions {
			if condition.Type == "Ready" && condition.Status == "True" {
				address, err = netip.ParseAddr(pod.Status.PodIP)
				return err
			}
		}
		return fmt.Errorf("pod %s is %s: %+v", name, pod.Status.Phase, pod.Status.Conditions)
	})
	if err != nil {
		return address, fmt.Errorf("wait for pod %s: %w: %s", name, err, c.Events(ctx, name))
	}
	return address, nil
}

// Delete deletes pods and waits until they are gone.
func (c *Cluster) Delete(ctx context.Context, names ...string) error {
	_, err := c.Kubectl(ctx, append([]string{"delete", "pod", "--timeout=" + Patience.String()}, names...)...)
	return err
}

// Events returns the messages of a pod's events, one per line, or the error of reading them.
func (c *Cluster) Events(ctx context.Context, name string) string {
	var events struct {
		Items []struct{ Type, Reason, Message string }
	}
	if err := c.Get(ctx, &events, "events", "--field-selector=involvedObject.name="+name); err != nil {
		return err.Error()
	}
	var lines []string
	for _, e := range events.Items {
		lines = append(lines, e.Reason+": "+e.Message)
	}
	return strings.Join(lines, "\n")
}

// Expose makes a NodePort service for the pods with label app and returns its ClusterIP. policy is
// the externalTrafficPolicy, Cluster or Local.
func (c *Cluster) Expose(t T, name, app, policy string, nodePort int) netip.Addr {
	t.Helper()
	port := func(protocol string) object {
		return object{"name": strings.ToLower(protocol), "protocol": protocol, "port": PeerPort, "nodePort": nodePort}
	}
	text := assert.Must(json.Marshal(object{
		"apiVersion": "v1", "kind": "Service",
		"metadata": object{"name": name},
		"spec": object{
			"type": "NodePort", "externalTrafficPolicy": policy, "selector": object{"app": app},
			"ports": []object{port("TCP"), port("UDP")},
		},
	}))(t)
	assert.NoError(t, c.Apply(t.Context(), string(text)))
	var service struct {
		Spec struct{ ClusterIP netip.Addr }
	}
	assert.NoError(t, c.Get(t.Context(), &service, "service", name))
	return service.Spec.ClusterIP
}
