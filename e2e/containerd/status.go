// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"context"
	"encoding/json"
	"fmt"
)

// Condition is one that a kubelet makes a node's readiness of.
type Condition struct {
	Type    string
	Status  bool
	Reason  string
	Message string
}

// NetworkReady is what CRI says of the network, asked now: with containerd 2 and a
// conflist of version 1.1.0 every question makes STATUS calls.
func (r *Runtime) NetworkReady(ctx context.Context) (Condition, error) {
	text, err := r.ask(ctx, "info")
	if err != nil {
		return Condition{}, err
	}
	var told struct {
		Status struct{ Conditions []Condition } `json:"status"`
	}
	if err := json.Unmarshal([]byte(text), &told); err != nil {
		return Condition{}, fmt.Errorf("read CRI status: %w: %s", err, text)
	}
	for _, c := range told.Status.Conditions {
		if c.Type == "NetworkReady" {
			return c, nil
		}
	}
	return Condition{}, fmt.Errorf("read CRI status: it says nothing of the network: %s", text)
}
