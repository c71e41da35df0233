// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// crdOverlays returns the overlays with objects whose CRDs the cluster lacks.
func crdOverlays() map[string]bool {
	return map[string]bool{"openshift": true, "uninstall-openshift": true, "monitoring": true}
}

// testManifests validates every overlay with the API server, strictly: no unknown fields or values.
func testManifests(t *testing.T, c *cluster.Cluster) {
	const root = "../../deploy/kustomize"
	directories := []string{"base", "uninstall"}
	for _, entry := range topology.Must(os.ReadDir(filepath.Join(root, "overlays")))(t) {
		if !crdOverlays()[entry.Name()] {
			directories = append(directories, "overlays/"+entry.Name())
		}
	}
	if len(directories) < 5 {
		t.Fatalf("only %q are there", directories)
	}
	for _, directory := range directories {
		if _, err := c.Kubectl(t.Context(), "apply", "--dry-run=server", "--validate=strict", "-k", filepath.Join(root, directory)); err != nil {
			t.Errorf("%s: %v", directory, err)
		}
	}
}
