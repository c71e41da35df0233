// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Binaries are the directories of programs that are not Debian packages.
type Binaries struct {
	// Own has ip-masq and ip-masq-reconciler, cni with the reference plugins, and deploy with helm.
	Own string
	// Containerd has containerd, its shim and ctr.
	Containerd string
	// Kubernetes has kube-apiserver, kubelet and so on.
	Kubernetes string
	// Flannel has flanneld, install-conf, the CNI plugin flannel and kube-flannel.yml.
	Flannel string
	// Images has the project's container images, ip-masq-TAG.tar.
	Images string
}

// FindBinaries returns the directories that environment variables of `make e2e-cluster` name.
func FindBinaries() (Binaries, error) {
	own, err := topology.BinDir()
	if err != nil {
		return Binaries{}, err
	}
	b := Binaries{
		Own:        own,
		Containerd: os.Getenv("IPMASQ_CONTAINERD_DIR"),
		Kubernetes: os.Getenv("IPMASQ_KUBERNETES_DIR"),
		Flannel:    os.Getenv("IPMASQ_FLANNEL_DIR"),
		Images:     os.Getenv("IPMASQ_IMAGE_DIR"),
	}
	for _, program := range []string{
		filepath.Join(b.Own, "ip-masq"),
		filepath.Join(b.Own, "cni", "bridge"),
		filepath.Join(b.Own, "deploy", "helm"),
		filepath.Join(b.Containerd, "containerd"),
		filepath.Join(b.Kubernetes, "kubelet"),
	} {
		if _, err := os.Stat(program); err != nil {
			return Binaries{}, fmt.Errorf("find binaries: %w (`make e2e-cluster` builds them and sets"+
				" IPMASQ_BIN_DIR, IPMASQ_CONTAINERD_DIR, IPMASQ_KUBERNETES_DIR and IPMASQ_IMAGE_DIR)", err)
		}
	}
	return b, nil
}
