// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// services is the prefix of ClusterIPs; the first address is the API server's.
func services() netip.Prefix { return netip.MustParsePrefix("10.96.0.0/16") }

// dnsAddress is the ClusterIP of DNS.
func dnsAddress() netip.Addr { return netip.MustParseAddr("10.96.0.10") }

// controlPlane is etcd and the three control plane programs of Kubernetes on one machine.
type controlPlane struct {
	authority *authority
	url       string
	// admin is the kubeconfig of an administrator.
	admin string
}

// startControlPlane starts the control plane on a machine of its own. It returns once the API server answers.
func (c *Cluster) startControlPlane(t T) {
	address, binaries := controlAddress(), c.options.Binaries.Kubernetes
	c.control = machine.New(t, c.World.AddPod(t, "control", address))
	directory := filepath.Join(c.directory, "pki")
	assert.NoError(t, os.Mkdir(directory, 0o700))
	a := newAuthority(t, directory)
	c.plane = &controlPlane{authority: a, url: fmt.Sprintf("https://%s", netip.AddrPortFrom(address, 6443))}
	c.plane.admin = a.kubeconfig(t, c.plane.url, "admin", "system:masters")
	run := func(program string, args ...string) {
		assert.Must(c.control.StartDaemon(filepath.Base(program), nil, program, args...))(t)
	}
	// No fsync: the data need not survive a crash.
	run("etcd", "--data-dir", filepath.Join(directory, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380", "--logger", "zap")

	serving := a.server(t, "kube-apiserver", []string{"kubernetes", "kubernetes.default.svc"}, address, services().Addr().Next())
	toKubelets := a.client(t, "apiserver-to-kubelets", "kube-apiserver", "system:masters")
	accounts := a.client(t, "service-accounts", "service-accounts")
	run(filepath.Join(binaries, "kube-apiserver"),
		"--etcd-servers=http://127.0.0.1:2379",
		"--advertise-address="+address.String(), "--secure-port=6443",
		"--tls-cert-file="+serving.certificate, "--tls-private-key-file="+serving.key,
		"--client-ca-file="+a.caFile(),
		"--kubelet-client-certificate="+toKubelets.certificate, "--kubelet-client-key="+toKubelets.key,
		"--kubelet-certificate-authority="+a.caFile(),
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+accounts.certificate, "--service-account-signing-key-file="+accounts.key,
		"--service-cluster-ip-range="+c.both(services(), services6()),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true", "--profiling=false",
		// Otherwise the API server repeats a request that etcd 3.4 does not support.
		"--feature-gates=SizeBasedListCostEstimate=false")
	// The other programs end if the API server has not yet created their roles at its start.
	assert.NoError(t, Await(t.Context(), Patience, func() error {
		if err := running(c.control); err != nil {
			return err
		}
		_, err := c.Kubectl(t.Context(), "get", "--raw", "/readyz")
		return err
	}))
	for user, args := range map[string][]string{
		"kube-controller-manager": {
			"--service-account-private-key-file=" + accounts.key, "--root-ca-file=" + a.caFile(),
			"--use-service-account-credentials=true", "--node-monitor-period=1s", "--node-monitor-grace-period=15s",
		},
		"kube-scheduler": nil,
	} {
		config := a.kubeconfig(t, c.plane.url, "system:"+user)
		args = append(args, "--kubeconfig="+config, "--leader-elect=false",
			"--authentication-kubeconfig="+config, "--authorization-kubeconfig="+config, "--bind-address=127.0.0.1")
		run(filepath.Join(binaries, user), args...)
	}
}

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
func FindBinaries(t T) Binaries {
	t.Helper()
	b := Binaries{
		Own:        topology.BinDir(t),
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
			t.Fatalf("find binaries: %v (`make e2e-cluster` builds them and sets"+
				" IPMASQ_BIN_DIR, IPMASQ_CONTAINERD_DIR, IPMASQ_KUBERNETES_DIR and IPMASQ_IMAGE_DIR)", err)
		}
	}
	return b
}
